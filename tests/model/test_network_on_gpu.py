"""The network in bfloat16 on a GPU, layer by layer against float32 on the CPU. Skipped without a GPU; to be run in a
process of its own (Triton's interpreter)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.model.network_world import golden_config, random_prompt
from whalepod.kernels.fallbacks import fallback_counts
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.checkpoint import EngramTable
from whalepod.model.config import ModelConfig
from whalepod.model.decode_graphs import DecodeGraphs
from whalepod.model.draft import Anchor
from whalepod.model.network import Network
from whalepod.model.random_weights import random_weights
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.tensor_layout import tensor_specs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)

LAYER_SHARE = 0.04
"""Mean difference of a layer's output, as a share of its mean magnitude (`conformity_detail.py`)."""
TOKENS = 300


def config_of_real_heads() -> ModelConfig:
    """The released attention's heads and records on few channels; candidates restrict what the prompt's rows see."""
    return golden_config(
        hidden_size=256, head_dim=512, qk_rope_head_dim=64, num_attention_heads=64, o_groups=8, o_lora_rank=64,
        q_lora_rank=128, index_head_dim=128, index_n_heads=32, sliding_window=128, index_topk=32,
        candidate_topk_blocks=16, candidate_block_size=8, moe_intermediate_size=128,
    )  # fmt: skip


def network(config: ModelConfig, device: str, dtype: torch.dtype) -> Network:
    specs = {spec.name: spec for spec in tensor_specs(config)}
    tensors = {
        name: tensor.to(device, torch.float32 if specs[name].float32 else dtype)
        for name, tensor in random_weights(tensor_specs(config), seed=5).items()
    }
    tables = {
        layer: EngramTable(tensors[f"layers.{layer}.engram.embed.weight"].cpu(), None, dtype)
        for layer in config.engram_layer_ids
    }
    token_map = torch.arange(config.vocab_size, dtype=torch.int32) % config.engram_compressed_vocab_size
    return Network(config, tensors, engram_tables=tables, token_map=token_map)


def caches(made: Network) -> Caches:
    return Caches.allocate(made.config, blocks=24, slots=2, formats=RELEASE_FORMATS, device=made.device)


def segments(
    prompt: list[int], chunks: list[tuple[int, int]], *, floor: int, table: Sequence[int] = range(23, -1, -1)
) -> list[Segment]:
    return [
        Segment(slot=1, block_table=tuple(table), start=start, token_ids=tuple(prompt[start:end]),
                history=tuple(prompt[max(0, start - 3) : start]), floor=floor, logits_start=0)
        for start, end in chunks
    ]  # fmt: skip


@pytest.mark.parametrize("floor", [0, TOKENS - 60])
def test_every_layer_is_close_in_prompts_and_in_decode(floor: int) -> None:
    config, fallbacks = config_of_real_heads(), fallback_counts()
    prompt = random_prompt(TOKENS + 8, seed=4)
    right, ours = network(config, "cpu", torch.float32), network(config, "cuda", torch.bfloat16)
    right_caches, our_caches = caches(right), caches(ours)
    chunks = [(0, 190), (190, TOKENS), (TOKENS, TOKENS + 1), (TOKENS + 1, TOKENS + 7), (TOKENS + 7, TOKENS + 8)]
    shares: dict[int, list[tuple[float, int]]] = {}
    for segment in segments(prompt, chunks, floor=floor):
        recorded: dict[str, Tensor] = {}
        right.forward([segment], right_caches, recorder=recorded.__setitem__)
        run = ours.begin([segment], our_caches)
        with torch.inference_mode():
            for layer in ours.layers:
                before = f"layer{layer.number - 1}"
                if layer.number:
                    rows = len(run.streams)
                    run.streams = padded(recorded[f"{before}.out"], rows).to("cuda", torch.bfloat16)
                    run.pre = padded(recorded[f"{before}.pre_mix_next"], rows).to("cuda")
                layer(run)
                if run.rows.count == 0:
                    break
                got, wanted = run.streams[: run.rows.count].float().cpu(), recorded[f"layer{layer.number}.out"]
                share = float((got - wanted).abs().mean() / wanted.abs().mean())
                shares.setdefault(layer.number, []).append((share, len(got)))
                # One row may have a near tie of experts, or a rounding that flips.
                assert share <= (LAYER_SHARE if len(got) > 1 else 5 * LAYER_SHARE), (segment.start, layer.number, share)
        # The next rows read what these left: start them from the same state.
        for kind in ("global_kv", "index_keys", "windows", "groups"):
            for layer, pool in getattr(right_caches, kind).items():
                getattr(our_caches, kind)[layer].copy_(pool)
    for layer, parts in shares.items():
        assert sum(share * rows for share, rows in parts) <= LAYER_SHARE * sum(rows for _, rows in parts), layer
    assert fallback_counts() == fallbacks


def padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat((rows, rows[-1:].expand(count - len(rows), *rows.shape[1:])))


def test_drafts_are_drawn() -> None:
    made = network(config_of_real_heads(), "cuda", torch.bfloat16)
    held, prompt = caches(made), random_prompt(TOKENS, seed=4)
    made.forward(segments(prompt, [(0, TOKENS)], floor=0), held)
    assert made.drafter is not None
    drafts = made.drafter.draft([Anchor(1, TOKENS, 7)], held)
    assert drafts.ids.shape == (1, 5) and bool(drafts.logits.isfinite().all())


def test_replayed_steps_give_what_launched_ones_give() -> None:
    """Decode rows, several rows of a sequence, and contexts that outgrow a shape."""
    config = config_of_real_heads()
    made, prompt = network(config, "cuda", torch.bfloat16), random_prompt(TOKENS + 40, seed=4)
    launched, replayed = caches(made), caches(made)
    for held in (launched, replayed):
        made.forward(segments(prompt, [(0, TOKENS)], floor=0), held)
    graphs = DecodeGraphs(made, replayed)
    at = TOKENS
    for count in (1, 1, 1, 6, 1, 6, 3):
        step = segments(prompt, [(at, at + count)], floor=TOKENS - 60)
        wanted, ours = made.forward(step, launched), graphs.logits(step)
        assert ours is not None and ours.shape == wanted.shape
        # The same kernels on more rows: a product may be summed another way.
        assert float((ours - wanted).abs().mean()) < 0.05
        at += count
    assert graphs.logits(segments(prompt, [(at, at + 9)], floor=0)) is None
    assert not any(operation == "decode_graphs" for operation, _ in fallback_counts())


def test_rows_have_the_same_bits_in_any_batch_and_chunking_unless_batches_are_whole() -> None:
    made, prompt = network(config_of_real_heads(), "cuda", torch.bfloat16), random_prompt(TOKENS + 8, seed=4)
    alone, together = caches(made), caches(made)
    steps = [(0, TOKENS), *((end - 1, end) for end in range(TOKENS + 1, TOKENS + 9))]
    wanted = torch.cat([made.forward([segment], alone) for segment in segments(prompt, steps, floor=0)])
    other, parts = tuple(random_prompt(TOKENS, seed=9)), list[Tensor]()
    chunks = segments(
        prompt, [(0, 70), (70, 71), (71, 207), (207, TOKENS), (TOKENS, TOKENS + 6)], floor=0, table=range(11, -1, -1)
    )
    for index, segment in enumerate(chunks):
        beside = Segment(
            slot=0, block_table=tuple(range(12, 24)), start=0, token_ids=other[: 20 + 40 * index], history=()
        )
        parts += [made.forward([beside, segment], together)]
    last = segments(prompt, [(TOKENS + 6, TOKENS + 8)], floor=0, table=range(11, -1, -1))
    replayed = DecodeGraphs(made, together).logits(last)
    assert replayed is not None
    assert torch.equal(torch.cat((*parts, replayed)), wanted)
