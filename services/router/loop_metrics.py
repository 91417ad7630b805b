"""Metrics of what one event loop does thousands of times a second: without the locks of prometheus_client."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from whalepod.core.clock import SYSTEM_CLOCK


class LoopHistogram(Collector):
    """A histogram that takes any number of equal values at a time."""

    def __init__(self, name: str, documentation: str, *, bounds: Sequence[float]) -> None:
        """`bounds`: upper ones, ascending."""
        self._name, self._documentation = name, documentation
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        REGISTRY.register(self)

    def observe(self, value: float, *, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def time(self) -> _Timed:
        """For a block: takes the seconds that it lasts."""
        return _Timed(self)

    def collect(self) -> Iterator[Metric]:
        buckets = list(zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._documentation, buckets=buckets, sum_value=self._sum)


class _Timed:
    __slots__ = ("_began_s", "_histogram")

    def __init__(self, histogram: LoopHistogram) -> None:
        self._histogram = histogram

    def __enter__(self) -> None:
        self._began_s = SYSTEM_CLOCK.monotonic_s()

    def __exit__(self, *error: object) -> None:
        self._histogram.observe(SYSTEM_CLOCK.monotonic_s() - self._began_s)


class LoopCounter(Collector):
    def __init__(self, name: str, documentation: str) -> None:
        self._name, self._documentation = name, documentation
        self._value = 0
        REGISTRY.register(self)

    def inc(self, count: int) -> None:
        self._value += count

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._documentation, value=self._value)
