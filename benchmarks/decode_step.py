"""A decode step of one layer of each kind at the released width, kernel by kernel, as a CUDA graph replays it.

    python benchmarks/decode_step.py [--rows N] [--context TOKENS] [--experts N] [--top N]

Needs a GPU with 141 GB. Weights are random bfloat16, as many experts a layer as one of several GPUs holds. Prints a
table for each number of rows, and last one JSON object: microseconds of each kind, and of a step of 40 such layers.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType  # torch.autograd has it without exporting it
from torch.profiler import ProfilerActivity, profile

from whalepod.kernels.fallbacks import fallback_counts
from whalepod.kernels.numerics import whole_batches
from whalepod.model.batch import Segment
from whalepod.model.batch_plan import BatchPlan
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.decode_graphs import shape_of
from whalepod.model.forward_pass import ForwardPass
from whalepod.model.layer import Layer
from whalepod.model.network import Network
from whalepod.model.plan_transfer import on_device
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.tensor_layout import tensor_specs

RELEASED = Path(__file__).parents[1] / "model/released_config.json"
KINDS = ("window only", "source, r = 2", "reuse, r = 2", "source, r = 1", "reuse, r = 1", "reindex")
LAYERS_OF_KIND = (2, 3, 15, 1, 15, 4)
"""In the released model."""
ROWS_EACH = 6
REPLAYS = 5


def cut_config(experts: int) -> ModelConfig:
    """One layer of each kind."""
    values: dict[str, Any] = json.loads(RELEASED.read_text(encoding="utf-8"))
    for name in ("vision_config", "quantization_config"):
        values.pop(name)
    values["text_config"] |= {
        "num_hidden_layers": len(KINDS),
        "compress_ratios": [0, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "n_routed_experts": experts,
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    return ModelConfig.from_json(values)


def random_network(config: ModelConfig) -> Network:
    generator = torch.Generator("cuda").manual_seed(1)
    tensors = {
        spec.name: torch.randn(spec.shape, device="cuda", generator=generator, dtype=torch.float32)
        .mul_(0.02 if len(spec.shape) > 1 else 1)
        .to(torch.float32 if spec.float32 else torch.bfloat16)
        for spec in tensor_specs(config)
    }
    return Network(config, tensors, engram_tables={}, token_map=None)


def filled_caches(config: ModelConfig, *, sequences: int, context: int) -> Caches:
    """Every record holds numbers of usual size."""
    blocks = sequences * (context // config.block_tokens)
    held = Caches.allocate(config, blocks=blocks, slots=sequences, formats=RELEASE_FORMATS, device="cuda")
    generator = torch.Generator("cuda").manual_seed(2)
    code_bytes = {528: 512, 288: 256, 68: 64}
    for pools in (held.global_kv, held.index_keys, held.windows):
        for pool in pools.values():
            codes = code_bytes[pool.shape[-1]]
            pool.random_(0, 256, generator=generator)
            if codes == 512:
                pool.bitwise_and_(0xF7)  # no E4M3 code is the one that stands for no number
            pool[..., codes:] = 0x30 if codes == 256 else 120
    return held


def steps(config: ModelConfig, *, sequences: int, rows: int, context: int) -> list[Segment]:
    each, blocks = rows // sequences, context // config.block_tokens
    order = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(3)).view(sequences, blocks)
    return [
        Segment(
            slot=slot,
            block_table=order[slot].tolist(),
            start=context - each,
            token_ids=[7 + slot] * each,
            history=[],
            logits_start=context - each,
        )
        for slot in range(sequences)
    ]


@dataclass(frozen=True, slots=True)
class LayerTime:
    us: float
    """From the first kernel's start to the last one's end."""
    gap_share: float
    """Of it, in which no kernel runs."""
    gap_longest: float
    """Likewise, the longest of them."""
    launches: int
    kernels: dict[str, float]
    """Name -> µs."""


def timed_layers(network: Network, held: Caches, segments: Sequence[Segment]) -> list[LayerTime]:
    shape = shape_of(segments, block_tokens=held.block_tokens)
    plan = on_device(BatchPlan.on_host(segments, network.config, held, packed=True, shape=shape), held.device)
    run = network.begin_planned(plan, held, text=None, memories={})
    times: list[LayerTime] = []
    with torch.inference_mode(), whole_batches():
        for layer in network.layers:
            times.append(_timed(layer, run))  # noqa: PERF401  in order, one after the other
    return times


def _timed(layer: Layer, run: ForwardPass) -> LayerTime:
    streams, pre = run.streams, run.pre

    def compute() -> None:
        run.streams, run.pre = streams, pre
        layer(run)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    _GRAPHS.append(graph)
    return _layer_time(profiler)


_GRAPHS: list[torch.cuda.CUDAGraph] = []
"""Later layers read what earlier ones chose: their memory stays."""


def _layer_time(profiler: profile) -> LayerTime:
    recorded = profiler.profiler
    assert recorded is not None and recorded.kineto_results is not None, "nothing was recorded"
    events = sorted(
        ((e.start_ns(), e.duration_ns(), e.name()) for e in recorded.kineto_results.events()
         if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0),
    )  # fmt: skip
    each = len(events) // REPLAYS
    replays = [events[index * each : (index + 1) * each] for index in range(1, REPLAYS)]
    spans = [max(start + duration for start, duration, _ in part) - part[0][0] for part in replays]
    middle = sorted(range(len(spans)), key=lambda index: spans[index])[len(spans) // 2]
    gaps = _gaps(replays[middle])
    kernels: defaultdict[str, float] = defaultdict(float)
    for _, duration, name in replays[middle]:
        kernels[_short(name)] += duration / 1e3
    return LayerTime(
        spans[middle] / 1e3,
        sum(gaps) / spans[middle],
        max(gaps) / spans[middle],
        len(replays[middle]),
        dict(kernels),
    )


def _gaps(kernels: Sequence[tuple[int, int, str]]) -> list[int]:
    """Nanoseconds before each kernel in which none runs; (start, duration, name) in the order of their starts. A kernel
    may be launched while the one before it runs."""
    gaps: list[int] = []
    ended = kernels[0][0]
    for start, duration, _ in kernels:
        gaps.append(max(0, start - ended))
        ended = max(ended, start + duration)
    return gaps


def _short(name: str) -> str:
    name = name.split("(", maxsplit=1)[0].split("<", maxsplit=1)[0].removeprefix("void ").split("::")[-1]
    return "library product" if any(word in name for word in ("gemm", "cutlass", "nvjet", "splitK")) else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, action="append", help="may be repeated; default 48, 384, 1024, 1536")
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--experts", type=int, default=96, help="a layer's on this GPU")
    parser.add_argument("--top", type=int, default=12, help="kernels a kind that are listed")
    options = parser.parse_args()
    config = cut_config(options.experts)
    network = random_network(config)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.experts} experts in bfloat16")
    figures: dict[str, Any] = {"context": options.context, "experts": options.experts}
    for rows in options.rows or (48, 384, 1024, 1536):
        _GRAPHS.clear()
        each = ROWS_EACH if rows % ROWS_EACH == 0 else 4
        sequences = rows // each
        held = filled_caches(config, sequences=sequences, context=options.context)
        times = timed_layers(network, held, steps(config, sequences=sequences, rows=rows, context=options.context))
        total = sum(time.us * count for time, count in zip(times, LAYERS_OF_KIND, strict=True))
        print(f"\n{rows} rows of {sequences} sequences at {options.context} tokens; 40 layers: {total / 1e3:.2f} ms")
        for kind, time in zip(KINDS, times, strict=True):
            print(
                f"  {kind}: {time.us:.0f} µs, {time.launches} launches of {len(time.kernels)} kernels, "
                f"gaps {time.gap_share:.1%}, the longest {time.gap_longest:.2%}"
            )
            for name, us in sorted(time.kernels.items(), key=lambda item: -item[1])[: options.top]:
                print(f"    {us:9.1f}  {name}")
        figures[f"{rows}"] = {
            "layers_40_us": round(total, 1),
            "us": {kind: round(time.us, 1) for kind, time in zip(KINDS, times, strict=True)},
            "gap_share": {kind: round(time.gap_share, 4) for kind, time in zip(KINDS, times, strict=True)},
            "gap_longest": {kind: round(time.gap_longest, 5) for kind, time in zip(KINDS, times, strict=True)},
        }
        del held
    figures["fallbacks"] = sum(fallback_counts().values())
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
