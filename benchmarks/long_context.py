"""One request of a million tokens at the released width: prefilled in chunks, then decoded, with what its caches take.

    python benchmarks/long_context.py [--tokens N] [--chunk N] [--experts N]

Needs a GPU. The model is cut to one layer of each kind (`decode_step.py`) with random weights. Prints last one JSON
object: bytes that the caches take beside what `spec` arithmetic says, seconds of prefill, microseconds of a token.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from decode_step import cut_config, random_network

from whalepod.kernels.fallbacks import fallback_counts
from whalepod.kernels.numerics import whole_batches
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.decode_graphs import DecodeGraphs
from whalepod.model.record_formats import RELEASE_FORMATS

DECODED = 32
ENTRY_BYTES = 288 + 68
"""Of global KV and index key."""
WINDOW_BYTES, RAW_BYTES = 528, 4096


def expected_bytes(config: ModelConfig, *, tokens: int, held: Caches) -> int:
    """Growing part by the token, fixed part by the sequence."""
    entries = sum(tokens // config.ratio(source) for source in config.kv_source_layer_ids)
    windows = config.num_hidden_layers * held.ring_rows * WINDOW_BYTES
    pairs = sum(config.ratio(source) > 1 for source in config.kv_source_layer_ids) * held.group_ring_rows * RAW_BYTES
    return entries * ENTRY_BYTES + windows + pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=48)
    options = parser.parse_args()
    config = cut_config(options.experts)
    network = random_network(config)
    prompt = options.tokens - DECODED
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    blocks = options.tokens // config.block_tokens
    held = Caches.allocate(config, blocks=blocks, slots=1, formats=RELEASE_FORMATS, device="cuda")
    taken, expected = torch.cuda.memory_allocated() - before, expected_bytes(config, tokens=options.tokens, held=held)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 100_000, (options.tokens,), generator=generator).tolist()

    def segment(start: int, end: int) -> Segment:
        return Segment(
            slot=0,
            block_table=range(blocks),
            start=start,
            token_ids=ids[start:end],
            history=[],
            floor=config.floor(prompt),
            logits_start=end - 1 if end >= prompt else None,
        )

    logits = torch.empty(0)
    started_s = time.perf_counter()
    for start in range(0, prompt, options.chunk):
        with whole_batches():
            logits = network.forward([segment(start, min(start + options.chunk, prompt))], held)
    torch.cuda.synchronize()
    prefill_s = time.perf_counter() - started_s
    assert len(logits) and bool(logits.isfinite().all()), "logits are no numbers"
    graphs = DecodeGraphs(network, held)
    steps: list[float] = []
    for position in range(prompt, options.tokens):
        started_s = time.perf_counter()
        with whole_batches():
            replayed = graphs.logits([segment(position, position + 1)])
        assert replayed is not None and bool(replayed.isfinite().all()), "no finite logits"
        steps.append(time.perf_counter() - started_s)
    figures = {
        "tokens": options.tokens,
        "layers": config.num_hidden_layers,
        "cache_bytes": taken,
        "expected_bytes": expected,
        "ratio": round(taken / expected, 4),
        "prefill_s": round(prefill_s, 2),
        "prefill_tokens_per_s": round(prompt / prefill_s),
        "decode_us": round(1e6 * sorted(steps)[len(steps) // 2], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "fallbacks": sum(fallback_counts().values()),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, chunks of {options.chunk}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
