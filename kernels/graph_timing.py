"""How a kernel is timed on a GPU: as a replay of a CUDA graph, alone or among many calls.

`graph_us` replays one call after the L2 cache was overwritten: it holds what a replay costs, some 4 µs on an H200, and
what the kernel pushes out of the cache must be written back first. `in_graph_us` is a share of a graph of many calls,
each on tensors of its own that no cache holds: what the kernel takes inside a step's graph, from cold memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

L2_FLUSH_BYTES = 256 << 20
REPEATS = 25
IN_GRAPH_BYTES = 256 << 20
"""What the calls of a graph go through before one comes back to the same tensors: four times the L2 cache."""
CALLS_MIN, CALLS_MAX = 12, 1024


def graph_us(function: Callable[[], object], *, repeats: int = REPEATS) -> float:
    """Median time of one replay of a CUDA graph that holds one call of `function`, in µs."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    return _replay_us([function], before=lambda: flush.fill_(1), repeats=repeats)


def in_graph_us(make: Callable[[int], Callable[[], object]], *, bytes: int) -> float:  # noqa: A002
    """Time of one call in a graph of many, in µs. `make(seed)` gives a call with tensors of its own, that moves
    `bytes`, and returns what it wrote."""
    return calls_us([make(seed) for seed in range(calls_needed(bytes))])


def calls_needed(bytes_each: int, *, calls_min: int = CALLS_MIN) -> int:
    """So that none finds its tensors in a cache."""
    return min(CALLS_MAX, max(calls_min, -(-IN_GRAPH_BYTES // bytes_each)))


def calls_us(calls: Sequence[Callable[[], object]], *, repeats: int = REPEATS) -> float:
    """Time of one of the calls in a graph of them all, in µs. Results are held until the graph ends, so that no two
    calls write to the same place."""
    return _replay_us(calls, before=lambda: None, repeats=repeats) / len(calls)


def _replay_us(calls: Sequence[Callable[[], object]], *, before: Callable[[], object], repeats: int) -> float:
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
    for _ in range(repeats):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    del held
    return sorted(times)[len(times) // 2]


def relative_error(out: Tensor, reference: Tensor) -> float:
    """‖out - reference‖ / ‖reference‖ in float64. Not a number if a value of `out` is none."""
    wide = reference.double()
    return float((out.double() - wide).norm() / wide.norm().clamp(min=1e-300))
