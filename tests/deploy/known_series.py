"""Series that a scrape of our processes can bring, by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tests.docs_tables import DeclaredMetric, declared_metrics
from tests.house_rules import PRODUCT_FOLDERS, read_sources


@functools.cache
def known_series() -> Mapping[str, DeclaredMetric]:
    """A histogram has three: `_bucket`, `_sum`, `_count`."""
    series: dict[str, DeclaredMetric] = {}
    for metric in declared_metrics(read_sources(folders=PRODUCT_FOLDERS)):
        suffixes = ("_bucket", "_sum", "_count") if metric.type == "histogram" else ("",)
        series |= {metric.name + suffix: metric for suffix in suffixes}
    return series
