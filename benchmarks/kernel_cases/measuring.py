"""How a kernel is timed, and what a row of the table says.

Two ways. `graph_us` replays one call after the L2 cache was overwritten: it holds what a replay costs, some 4 µs, and
what the kernel pushes out of the cache must be written back first. `in_graph_us` is a share of a graph of many calls,
each on tensors of its own that no cache holds: what the kernel takes inside a step's graph, from cold memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

COPY_BYTES_PER_S = 4.3e12
"""What a device-to-device copy reaches on an H200, bytes read and written."""
BF16_FLOPS = 794e12
FP8_FLOPS = 1495e12
"""What library matrix products of 8192³ random values reach there."""
L2_FLUSH_BYTES = 256 << 20
REPEATS = 25
IN_GRAPH_BYTES = 256 << 20
"""What the calls of a graph go through before one comes back to the same tensors: four times the L2 cache."""
CALLS_MIN, CALLS_MAX = 12, 1024
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


def graph_us(function: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Median time of one replay of a CUDA graph that holds one call of `function`, in µs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: list[float] = []
    for _ in range(repeats):
        flush.fill_(1)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def in_graph_us(make: Callable[[int], Callable[[], object]], *, bytes: int) -> float:
    """Time of one call in a graph of many, in µs. `make(seed)` gives a call with tensors of its own, that moves `bytes`
    and returns what it wrote: results are held until the graph ends, so that no two calls write to the same place."""
    count = min(CALLS_MAX, max(CALLS_MIN, -(-IN_GRAPH_BYTES // bytes)))
    calls = [make(seed) for seed in range(count)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = [call() for call in calls]
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / count)
    del held
    return sorted(times)[len(times) // 2]


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


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64. Not a number if a value of `out` is none."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm().clamp(min=1e-300))


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
