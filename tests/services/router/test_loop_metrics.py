"""Metrics without locks are scraped as prometheus_client's own are."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from whalepod.services.router.loop_metrics import LoopCounter, LoopHistogram

BOUNDS = (0.001, 0.25, 1.0)


def samples(metric: Metric) -> list[tuple[str, dict[str, str], float]]:
    return [(one.name, one.labels, one.value) for one in metric.samples if not one.name.endswith("_created")]


def test_values_are_counted_as_ever() -> None:
    ours = LoopHistogram("test_ours", "Seconds.", bounds=BOUNDS), LoopCounter("test_our_count", "Tokens.")
    try:
        apart = CollectorRegistry()
        theirs = Histogram("test_ours", "Seconds.", buckets=BOUNDS, registry=apart)
        count = Counter("test_our_count", "Tokens.", registry=apart)
        for value in (0.0, 0.001, 0.0011, 0.25, 3.0):
            theirs.observe(value)
            ours[0].observe(value)
        theirs.observe(0.5)
        theirs.observe(0.5)
        ours[0].observe(0.5, times=2)
        count.inc(7)
        ours[1].inc(7)
        for one, other in zip(ours, (theirs, count), strict=True):
            assert samples(*one.collect()) == samples(*other.collect())
    finally:
        for one in ours:
            REGISTRY.unregister(one)


def test_a_block_is_timed_also_when_it_fails() -> None:
    ours = LoopHistogram("test_timed", "Seconds.", bounds=(1000.0,))
    try:
        with ours.time():
            pass
        with pytest.raises(ValueError, match="inside"), ours.time():
            raise ValueError("inside")
        (metric,) = ours.collect()
        taken = {one.name: one.value for one in metric.samples}
        assert taken["test_timed_count"] == 2
        assert 0 < taken["test_timed_sum"] < 1000
    finally:
        REGISTRY.unregister(ours)
