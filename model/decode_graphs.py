"""Forwards of a few rows a sequence as CUDA graphs: recorded once for a shape, replayed with what is to be computed.

    segments ─▶ shape ─▶ plan on the host ─▶ one copy into the recording's tensors ─▶ replay ─▶ logits

A forward launches more than a thousand kernels, most of them shorter than the host takes to launch one. Rows, segments
and contexts are rounded up to a few sizes, so that few shapes are ever recorded; padding computes the last row again
and writes it nowhere.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whalepod.kernels.fallbacks import note_fallback
from whalepod.kernels.numerics import tiled

from .batch import Segment
from .batch_plan import BatchPlan
from .caches import Caches
from .network import Network
from .packed_plan import GROUP_ROWS_MAX, PlanShape
from .plan_transfer import stage, unstage
from .record_formats import RELEASE_FORMATS
from .tensor_layout import ModelRole

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
TOKENS_MIN = 1024
RECORDINGS_MAX = 64
"""Shapes that are kept; the one that was used longest ago gives way."""


def shape_of(segments: Sequence[Segment], *, block_tokens: int) -> PlanShape | None:
    """The smallest shape that holds them, None if there are more rows than in any."""
    counts = [len(segment.token_ids) for segment in segments]
    held = _held(len(segments), rows=sum(counts), several=max(counts) > 1)
    if held is None:
        return None
    tokens = max(TOKENS_MIN, block_tokens, 1 << (max(segment.end for segment in segments) - 1).bit_length())
    return PlanShape(
        rows=held[0],
        segments=held[1],
        tokens=-(-tokens // block_tokens) * block_tokens,
        group_rows=1 << (max(counts) - 1).bit_length(),
    )


def batch_sizes(sequences_max: int, *, rows: int) -> list[int]:
    """Batches of sequences that compute `rows` rows each, the largest first: one for each shape that batches up to
    `sequences_max` of them have, whatever the contexts."""
    largest: dict[tuple[int, int], int] = {}
    for sequences in range(1, sequences_max + 1):
        held = _held(sequences, rows=sequences * rows, several=rows > 1)
        if held is not None:
            largest[held] = sequences
    return sorted(largest.values(), reverse=True)


def _held(segments: int, *, rows: int, several: bool) -> tuple[int, int] | None:
    """Rows and segments of the smallest shape. `several`: a segment has more rows than one."""
    held = next((size for size in ROWS if size >= segments), None)
    padding = held is not None and held > segments
    size = next((size for size in ROWS if size >= rows + padding), None)
    if held is None or size is None:
        return None
    return size, held if several else size


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    staged: Tensor
    """What the plan's tensors are views of."""
    memories: Mapping[int, Tensor]
    logits: Tensor
    """[rows, vocab_size]"""


class DecodeGraphs:
    """Of one network over one set of caches. Belongs to the thread that computes steps."""

    def __init__(self, network: Network, caches: Caches) -> None:
        self._network = network
        self._caches = caches
        # More of a sequence would overwrite window records that its first row sees.
        self._rows_max = min(GROUP_ROWS_MAX, caches.ring_rows - network.config.window + 1)
        self._recordings: OrderedDict[tuple[PlanShape, bool], _Recording] = OrderedDict()
        self._pool: Any = None

    @classmethod
    def can_hold(cls, network: Network, caches: Caches) -> bool:
        """Whether its forwards can be recorded: records stay packed on a GPU, and all experts are there."""
        packed = network.packed and caches.formats == RELEASE_FORMATS and network.device.type == "cuda"
        return packed and network.holds_experts and network.role is ModelRole.FULL

    def logits(self, segments: Sequence[Segment]) -> Tensor | None:
        """Logits [rows, vocab_size] of the rows that asked for them, as `Network.forward` gives them; valid until the
        next call. None: these segments are not computed this way, and nothing was."""
        if not segments or not all(map(self._fits, segments)):
            return None
        shape = shape_of(segments, block_tokens=self._caches.block_tokens)
        if shape is None:
            return None
        plan = BatchPlan.on_host(segments, self._network.config, self._caches, packed=True, shape=shape)
        memories = self._network.memories(segments, padded=shape.rows)
        key = shape, tiled()
        if key not in self._recordings and not self._record(key, plan, memories):
            return None
        self._recordings.move_to_end(key)
        recording = self._recordings[key]
        recording.staged.copy_(stage(plan, pinned=True), non_blocking=True)
        for layer, memory in memories.items():
            recording.memories[layer].copy_(memory, non_blocking=True)
        recording.graph.replay()
        rows = recording.logits[: plan.every.count]
        asked = [
            segment.logits_start is not None and position >= segment.logits_start
            for segment in segments
            for position in range(segment.start, segment.end)
        ]
        return rows if all(asked) else rows[torch.tensor(asked).to(rows.device)]

    def _fits(self, segment: Segment) -> bool:
        image = self._network.config.image_token_id
        return (
            len(segment.token_ids) <= self._rows_max
            and segment.start >= segment.floor
            and (image is None or image not in segment.token_ids)
        )

    def _record(self, key: tuple[PlanShape, bool], plan: BatchPlan, memories: Mapping[int, Tensor]) -> bool:
        """Computes the plan, too. False: it cannot be recorded."""
        staged = stage(plan, pinned=True).to(self._caches.device, non_blocking=True)
        held = {layer: memory.clone() for layer, memory in memories.items()}
        there = unstage(plan, staged)
        try:
            stream = torch.cuda.Stream(self._caches.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._compute(there, held)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads copy blocks to the host meanwhile: only what this one does is recorded.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = self._compute(there, held)
        except RuntimeError as error:
            note_fallback("decode_graphs", str(error).splitlines()[0], runs="steps that are not recorded")
            return False
        self._pool = graph.pool()
        while len(self._recordings) >= RECORDINGS_MAX:
            self._recordings.popitem(last=False)
        self._recordings[key] = _Recording(graph, staged, held, logits)
        log.info("recorded a decode step", extra={"rows": key[0].rows, "tokens": key[0].tokens})
        return True

    def _compute(self, plan: BatchPlan, memories: Mapping[int, Tensor]) -> Tensor:
        run = self._network.begin_planned(plan, self._caches, text=None, memories=memories)
        return self._network.logits(self._network.run(run))
