"""What a row of the table says. `kernels/graph_timing.py` times it in two ways: `graph_us` and `in_graph_us`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from whalepod.kernels.graph_timing import CALLS_MAX, IN_GRAPH_BYTES, graph_us, in_graph_us, relative_error

__all__ = ["InGraph", "Row", "graph_us", "in_graph", "in_graph_us", "relative_error", "row"]

COPY_BYTES_PER_S = 4.3e12
"""What a device-to-device copy reaches on an H200, bytes read and written."""
BF16_FLOPS = 794e12
FP8_FLOPS = 1495e12
"""What library matrix products of 8192³ random values reach there."""
PROCESSORS = 132


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Times are medians of a CUDA graph's replays, each after the L2 cache was overwritten."""

    kernel: str
    shape: str
    us: float
    bytes: int
    """Fewest bytes through device memory: every input read once, every output written once."""
    flops: int
    bound_us: float
    """The larger of bytes and operations over what copies and matrix products reach."""
    ratio: float
    """us / bound_us"""
    error: float | None
    """‖out - reference‖ / ‖reference‖ at this shape, reference in float32; None: compared exactly, and equal."""
    peer: str | None
    peer_us: float | None
    in_graph_us: float | None = None
    """One call inside a graph of many, on tensors that lie in no cache (`in_graph_us`)."""
    in_graph_ratio: float | None = None
    """in_graph_us / bound_us"""
    copy_in_graph_us: float | None = None
    """torch's plainest kernel on as many bytes, half of them read and half written, timed in the same way."""
    floor_in_graph_us: float | None = None
    """A kernel that does nothing, timed in the same way."""


@dataclass(frozen=True, slots=True)
class InGraph:
    """What a kernel takes inside a graph, and what it is held against; µs."""

    us: float
    copy_us: float
    floor_us: float


def in_graph(make: Callable[[int], Callable[[], object]], *, bytes: int) -> InGraph:
    """`in_graph_us`, and beside it a copy of as many bytes and a kernel that does nothing."""
    return InGraph(in_graph_us(make, bytes=bytes), copy_in_graph_us(bytes), floor_in_graph_us())


@cache
def copy_in_graph_us(bytes: int) -> float:
    """torch's plainest kernel, which reads half of `bytes` and writes the other half. Copies are no kernels to a graph,
    and take 1 µs longer."""

    def make(seed: int) -> Callable[[], object]:
        source = torch.full((bytes // 8,), seed, dtype=torch.int32, device="cuda")
        target = torch.empty_like(source)
        return lambda: torch.bitwise_not(source, out=target)

    return in_graph_us(make, bytes=bytes)


@cache
def floor_in_graph_us() -> float:
    """A kernel that does nothing, a program on each processor."""
    return in_graph_us(_nothing, bytes=IN_GRAPH_BYTES // CALLS_MAX)


def _nothing(seed: int) -> Callable[[], object]:
    return lambda: nothing_kernel[(PROCESSORS,)](seed)


@triton.jit(do_not_specialize=["seed"])
def nothing_kernel(seed: int) -> None:
    tl.assume(seed >= 0)


def row(
    kernel: str,
    shape: str,
    us: float,
    *,
    bytes: int,
    flops: int = 0,
    flops_per_s: float = BF16_FLOPS,
    error: float | None = None,
    peer: str | None = None,
    peer_us: float | None = None,
    in_graph: InGraph | None = None,
) -> Row:
    bound_us = 1e6 * max(bytes / COPY_BYTES_PER_S, flops / flops_per_s)
    line = Row(kernel, shape, us, bytes, flops, bound_us, us / bound_us, error, peer, peer_us)
    if in_graph is None:
        return line
    return replace(
        line,
        in_graph_us=in_graph.us,
        in_graph_ratio=in_graph.us / bound_us,
        copy_in_graph_us=in_graph.copy_us,
        floor_in_graph_us=in_graph.floor_us,
    )
