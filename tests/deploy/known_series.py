"""Series that a scrape of our processes can bring, by name: what docs/metrics.md lists, which a test holds against the
code."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from tests.docs_tables import DeclaredMetric
from tests.house_rules import ROOT

ROW = re.compile(r"^\| `([a-z0-9_:]+)` \| (counter|gauge|histogram) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)


@functools.cache
def known_series() -> Mapping[str, DeclaredMetric]:
    """A histogram has three: `_bucket`, `_sum`, `_count`."""
    series: dict[str, DeclaredMetric] = {}
    for name, kind, labels, meaning in ROW.findall((ROOT / "docs/metrics.md").read_text(encoding="utf-8")):
        metric = DeclaredMetric(name, kind, tuple(re.findall(r"`([^`]+)`", labels)), meaning)
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        series |= {name + suffix: metric for suffix in suffixes}
    return series
