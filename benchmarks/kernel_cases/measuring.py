"""How a kernel is timed, and what a row of the table says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

COPY_BYTES_PER_S = 4.3e12
"""What a device-to-device copy reaches on an H200, bytes read and written."""
BF16_FLOPS = 794e12
FP8_FLOPS = 1495e12
"""What library matrix products of 8192³ random values reach there."""
L2_FLUSH_BYTES = 256 << 20
REPEATS = 25


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
) -> Row:
    bound_us = 1e6 * max(bytes / COPY_BYTES_PER_S, flops / flops_per_s)
    return Row(kernel, shape, us, bytes, flops, bound_us, us / bound_us, error, peer, peer_us)
