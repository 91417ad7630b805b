"""What the tuner launches: every tunable kernel on random tensors of the released model's shapes, at numbers of rows
that steps have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import rms_norm as norms
from .attention_rows import EntryRows, LatentRows, WindowRows
from .attention_rows import triton_kernel as attention_rows
from .attention_rows.key_kernel import write_index_keys
from .candidates import triton_kernel as candidates
from .engram_gate.triton_kernel import let_in
from .experts.triton_kernel import routed_experts, swiglu
from .index_queries.triton_kernel import index_queries
from .launch_sizes import ANY, forced
from .mhc import triton_kernel as mhc
from .packed_index_scores import packed_index_scores
from .quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32
from .quantise.triton_kernel import fp8_block32_round_trip
from .sparse_attention import sparse_attention
from .top_entries.triton_kernel import top_entries

D, S, Q_RANK, PAIRS, INDEX_HEADS, INDEX_WIDTH = 5120, 4, 1280, 32, 32, 128
HEADS, WIDTH, WINDOW, RING, CHOSEN = 64, 512, 128, 140, 512
ENTRIES, BLOCK, DRAFT_ROWS = 65_536, 256, 6
EXPERTS, CHOICES, COLUMNS = 48, 6, 2304
"""As many experts as one of eight GPUs holds."""
EXPERT_BYTES = EXPERTS * 3 * COLUMNS * D * 2

DEVICE = torch.device("cuda")

Call: TypeAlias = Callable[[], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    rows: tuple[int, ...]
    """Numbers of rows, as the kernel asks for its sizes."""
    make: Callable[[int, int], Call]
    """(rows, seed) -> a call on tensors of its own, if those are not larger than every cache."""
    row_bytes: int
    """What a row moves at least."""
    rows_each: int = 1
    """A multiple of these."""
    shared_bytes: int = 0
    """What all rows move together."""
    shape: str = ANY
    hopper: bool | None = None
    """Whether only Hopper launches it, or only others do."""


def cases(major: int) -> list[Case]:
    """Of a chip whose compute capability begins with `major`."""
    return [case for case in _all_cases() if case.hopper is None or case.hopper == (major == 9)]


def _all_cases() -> list[Case]:
    few, many = (48, 384, 1536, 4096), (48, 384)
    drafts: dict[str, Any] = {"rows_each": DRAFT_ROWS}
    choices: dict[str, Any] = {"rows_each": CHOICES, "shared_bytes": EXPERT_BYTES}
    return [
        Case("attention_rows", (48, 1536, 16384), _attention_rows, 14_500),
        Case("index_keys", (48, 1536, 4096, 16384), _index_keys, 2 * WIDTH + 68, 2 * WIDTH * INDEX_WIDTH),
        Case("swiglu", few, _swiglu, 6 * COLUMNS),
        Case("round_trip", few, _round_trip, 4 * D),
        Case("index_queries", few, _index_queries, 4 * INDEX_HEADS * INDEX_WIDTH),
        Case("mhc_collapse", few, _collapse, 2 * (S + 1) * D),
        Case("mhc_expand", few, _expand, 2 * (2 * S + 1) * D),
        Case("rms_norm", few, partial(_norm, norms.rms_norm), 4 * D),
        Case("rms_norm_fp8", few, partial(_norm, norms.rms_norm_fp8), 5 * D),
        Case("engram_gate", few, _engram_gate, 2 * (3 * S + 1) * D),
        Case("group_maxima", many, _top_entries, 4 * ENTRIES),
        Case("top_entries", many, _top_entries, 4 * ENTRIES),
        Case("block_maxima", many, _block_maxima, 4 * ENTRIES),
        Case("candidate_scores", many, _candidate_scores, 2048 * 8 * 72, **drafts),
        Case("index_scores_hopper", many, _index_scores, ENTRIES * (4 + 68 // DRAFT_ROWS), **drafts, hopper=True),
        Case("index_scores", many, _index_scores, ENTRIES * (4 + 68 // DRAFT_ROWS), **drafts, hopper=False),
        Case("sparse_attention_hopper", (6, 12, 24, 48, 96, 192), _attention, CHOSEN * 288, **drafts, hopper=True),
        Case("sparse_attention", (6, 12, 24, 48, 96, 192, 1536), _attention, CHOSEN * 288, **drafts, hopper=False),
        Case("mhc_predict", few, _predict, 2 * S * D),
        *(
            Case(kernel, (count * CHOICES,), partial(_experts, tile), 2 * D, **choices, shape=str(tile))
            for tile, count in ((16, 48), (32, 192), (64, 384), (128, 1536))
            for kernel in ("experts_gate_up", "experts_down")
        ),
        Case("expert_tiles", (6, 12, 24, 48, 192), _expert_tiles, 2 * D, shared_bytes=EXPERT_BYTES),
    ]


def _normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, generator=torch.Generator(DEVICE).manual_seed(seed))


_draw = partial(_normal, dtype=torch.bfloat16)


def _bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randint(low, high, shape, device=DEVICE, dtype=torch.uint8, generator=generator)


def _entry_rows(rows: int, seed: int) -> EntryRows:
    """Each row is a group."""
    angles, each = _normal(rows, PAIRS, seed=seed), torch.arange(rows, dtype=torch.int32, device=DEVICE)
    entries, keys = (
        torch.empty(rows, kind.record_bytes(width), dtype=torch.uint8, device=DEVICE)
        for kind, width in ((FP4_BLOCK16, WIDTH), (MXFP4_BLOCK32, INDEX_WIDTH))
    )
    weight, norm, key_norm = _draw(INDEX_WIDTH, WIDTH, seed=seed), _draw(WIDTH, seed=1), _draw(INDEX_WIDTH, seed=2)
    raw, cos, sin = _normal(rows, WIDTH, seed=seed), angles.cos(), angles.sin()
    return EntryRows(raw, None, None, None, norm, weight, key_norm, cos, sin, each, entries, keys)


def _attention_rows(rows: int, seed: int) -> Call:
    """With the index keys that follow."""
    entries, joined = _entry_rows(rows, seed), _draw(rows, Q_RANK + WIDTH, seed=seed)
    pool = torch.empty(rows, FP8_BLOCK32.record_bytes(WIDTH), dtype=torch.uint8, device=DEVICE)
    norms = _draw(Q_RANK, seed=1), _draw(WIDTH, seed=2)
    latents = LatentRows(joined[:, :Q_RANK], norms[0])
    window = WindowRows(joined[:, Q_RANK:], norms[1], entries.cos, entries.sin, entries.destinations, pool)

    def call() -> tuple[Tensor, ...]:
        written = attention_rows.write_attention_rows(latents, window, entries, eps=1e-20)
        assert written is not None
        return written, pool, entries.entries, entries.keys

    return call


def _index_keys(rows: int, seed: int) -> Call:
    entries, latents = _entry_rows(rows, seed), _draw(rows, WIDTH, seed=seed)

    def call() -> Tensor:
        write_index_keys(latents, torch.zeros(rows, dtype=torch.int32, device=DEVICE), entries, eps=1e-20)
        return entries.keys

    return call


def _norm(norm: Callable[..., Any], rows: int, seed: int) -> Call:
    x, weight = _draw(rows, D, seed=seed), _draw(D, seed=seed)
    return lambda: norm(x, weight, eps=1e-20)


def _round_trip(rows: int, seed: int) -> Call:
    x = _draw(rows, D, seed=seed)
    return lambda: fp8_block32_round_trip(x)


def _swiglu(rows: int, seed: int) -> Call:
    gates = _draw(rows, 2 * COLUMNS, seed=seed)
    return lambda: swiglu(gates, limit=10.0, round_trip=True)


def _index_queries(rows: int, seed: int) -> Call:
    queries, angles = _draw(rows, INDEX_HEADS, INDEX_WIDTH, seed=seed), _normal(rows, PAIRS, seed=seed)
    cos, sin = angles.cos(), angles.sin()
    return lambda: index_queries(queries, cos, sin)


def _engram_gate(rows: int, seed: int) -> Call:
    streams, projected = _draw(rows, S, D, seed=seed), _draw(rows, (S + 1) * D, seed=seed)
    weight = _draw(S, D, seed=seed)
    return lambda: let_in(streams, projected, weight, None, eps=1e-20)


def _predict(rows: int, seed: int) -> Call:
    streams, halves = _draw(rows, S, D, seed=seed), mhc.split_weights(_normal(24, S * D, seed=0) * 0.02)
    scale, base = _normal(24, seed=seed).abs(), _normal(24, seed=seed)
    return lambda: mhc.predict_mixes(streams, halves, scale, base, rms_eps=1e-20, eps=1e-6, iterations=20)


def _collapse(rows: int, seed: int) -> Call:
    streams, weights = _draw(rows, S, D, seed=seed), _normal(rows, S, seed=seed).sigmoid()
    return lambda: mhc.collapse(streams, weights)


def _expand(rows: int, seed: int) -> Call:
    y, streams, post = _draw(rows, D, seed=seed), _draw(rows, S, D, seed=seed), _normal(rows, S, seed=seed).sigmoid()
    comb = _normal(rows, S, S, seed=seed).softmax(dim=1)
    return lambda: mhc.expand(y, streams, post, comb)


def _scores(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Scores of sums of rectified products, half of which tie at 0, and how many entries each row sees: all."""
    visible = torch.full((rows,), ENTRIES, dtype=torch.int32, device=DEVICE)
    return _normal(rows, ENTRIES, seed=seed).clamp(min=0), visible


def _top_entries(rows: int, seed: int) -> Call:
    scores, visible = _scores(rows, seed)
    return lambda: top_entries(scores, visible, count=512)


def _block_maxima(rows: int, seed: int) -> Call:
    scores, visible = _scores(rows, seed)
    return lambda: candidates.block_maxima(scores, visible, block=8)


@cache
def _index_world(rows: int) -> dict[str, Any]:
    """Index queries, and keys of the sequences whose rows share them; larger than every cache."""
    sequences = rows // DRAFT_ROWS
    each = torch.arange(sequences, dtype=torch.int32, device=DEVICE)
    # Codes, and scales of such numbers as keys are.
    keys = (
        _bytes(sequences * ENTRIES, INDEX_WIDTH // 2),
        _bytes(sequences * ENTRIES, INDEX_WIDTH // 32, low=122, high=128),
    )
    return {
        "queries": MXFP4_BLOCK32.round_trip(_draw(rows, INDEX_HEADS, INDEX_WIDTH, seed=0)),
        "weights": _normal(rows, INDEX_HEADS, seed=2) * (INDEX_WIDTH * INDEX_HEADS) ** -0.5,
        "keys": torch.cat(keys, dim=1),
        "tables": torch.arange(sequences * ENTRIES // BLOCK, dtype=torch.int32, device=DEVICE).view(sequences, -1),
        "segments": each.repeat_interleave(DRAFT_ROWS),
        "visible": torch.full((rows,), ENTRIES, dtype=torch.int32, device=DEVICE),
        "entries_per_block": BLOCK,
    }


def _index_scores(rows: int, seed: int) -> Call:  # noqa: ARG001  its keys are shared
    given, each = _index_world(rows), torch.arange(rows // DRAFT_ROWS, dtype=torch.int32, device=DEVICE)
    groups = torch.stack((each * DRAFT_ROWS, torch.full_like(each, DRAFT_ROWS), each))
    return lambda: packed_index_scores(**given, groups=groups, group_rows=DRAFT_ROWS, entries_max=ENTRIES)


def _candidate_scores(rows: int, seed: int) -> Call:
    blocks = _normal(rows, ENTRIES // 8, seed=seed).argsort(dim=1)[:, :2048].sort(dim=1).values.int()
    return lambda: candidates.candidate_scores(**_index_world(rows), blocks=blocks, block=8)


@cache
def _attention_pools(sequences: int) -> tuple[Tensor, Tensor]:
    return (
        FP8_BLOCK32.encode(_normal(sequences * RING, WIDTH, seed=3)),
        FP4_BLOCK16.encode(_normal(min(sequences, 8) * ENTRIES, WIDTH, seed=4)),
    )


def _attention(rows: int, seed: int) -> Call:
    sequences, normal = rows // DRAFT_ROWS, partial(_normal, seed=seed)
    window, entries = _attention_pools(sequences)
    chosen = normal(rows, CHOSEN).mul_(1e8).int().remainder_(len(entries)).sort(dim=1).values.int()
    given: dict[str, Any] = {
        "queries": _draw(rows, HEADS, WIDTH, seed=seed),
        "bases": torch.arange(sequences, dtype=torch.int32, device=DEVICE).repeat_interleave(DRAFT_ROWS) * RING,
        "positions": 70_000 + torch.arange(DRAFT_ROWS, dtype=torch.int32, device=DEVICE).repeat(sequences),
        "lowest": torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        "sink": normal(HEADS),
        "cos": normal(rows, PAIRS).cos(),
        "sin": normal(rows, PAIRS).sin(),
        "ring": RING,
        "window_rows": WINDOW,
        "scale": WIDTH**-0.5,
    }
    return lambda: sparse_attention(**given, window=window, entries=entries, chosen=chosen)


@cache
def _expert_weights() -> tuple[Tensor, Tensor]:
    gate_up, down = _draw(EXPERTS, 2 * COLUMNS, D, seed=5), _draw(EXPERTS, D, COLUMNS, seed=6)
    return gate_up.mul_(D**-0.5), down.mul_(COLUMNS**-0.5)


def _experts(tile: int | None, pairs: int, seed: int) -> Call:
    """In tiles of so many rows; None: as the table says."""
    rows, (gate_up, down) = pairs // CHOICES, _expert_weights()
    x, ids = _draw(rows, D, seed=seed), _normal(rows, EXPERTS, seed=seed).argsort(dim=1)[:, :CHOICES]
    weights = _normal(rows, CHOICES, seed=seed).softmax(dim=1)

    def call() -> Tensor:
        with forced("expert_tiles", ROWS=tile) if tile is not None else nullcontext():
            return routed_experts(x, ids, weights, gate_up, down, limit=10.0, input_format=FP8_BLOCK32)

    return call


def _expert_tiles(each: int, seed: int) -> Call:
    """Of `each` pairs an expert."""
    return _experts(None, each * EXPERTS, seed)
