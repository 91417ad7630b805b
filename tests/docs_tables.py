"""The tables of `docs/` that are read from the code. `make docs` writes them, `test_docs.py` compares.

A page holds a table between `<!-- NAME -->` and `<!-- end of NAME -->`; what stands around it is written by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.failure_rows import rows_of_table
from tests.house_rules import PRODUCT_FOLDERS, ROOT, Source, read_sources
from whalepod.cluster.config_sources import settings

METRIC_PREFIXES = ("whalepod_", "vllm:", "sglang:")
METRIC_TYPES: Mapping[str, str] = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "Gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "Histogram": "histogram",
    "HistogramMetricFamily": "histogram",
    "Info": "info",
    "InfoMetricFamily": "info",
    "LoopCounter": "counter",
    "LoopHistogram": "histogram",
}
METRIC_SUFFIXES: Mapping[str, str] = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True, slots=True, order=True)
class DeclaredMetric:
    """One metric as the code declares it. `name` is the one that is scraped."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


def declared_metrics(sources: Iterable[Source]) -> list[DeclaredMetric]:
    return sorted({metric for source in sources for metric in _metrics_of(source)})


def _metrics_of(source: Source) -> Iterator[DeclaredMetric]:
    for call in source.calls():
        ours = call.func.id if isinstance(call.func, ast.Name) else ""  # imported from a neighbour
        class_name = source.dotted(call.func).rpartition(".")[2] or ours
        given = [_literal(argument) for argument in call.args]
        keywords = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        name = given[0] if given else keywords.get("name")
        if class_name not in METRIC_TYPES or not isinstance(name, str) or not name.startswith(METRIC_PREFIXES):
            continue
        labels = keywords.get("labelnames", keywords.get("labels", given[2] if len(given) > 2 else None))
        kind = METRIC_TYPES[class_name]
        suffix = METRIC_SUFFIXES.get(kind, "")
        yield DeclaredMetric(
            name=name.removesuffix(suffix) + suffix,
            type=kind,
            labels=tuple(str(label) for label in labels) if isinstance(labels, list | tuple) else (),
            meaning=str(given[1] if len(given) > 1 else keywords.get("documentation", "")),
        )


def _literal(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def metrics_table(sources: Iterable[Source]) -> str:
    rows = [
        (f"`{metric.name}`", metric.type, " ".join(f"`{label}`" for label in metric.labels), metric.meaning)
        for metric in declared_metrics(sources)
    ]
    return _table(("metric", "type", "labels", "meaning"), rows)


def settings_table() -> str:
    rows = [
        (f"`{setting.key}`", f"`{setting.flag}`", f"`{setting.variable}`", _shown(setting.default), setting.description)
        for setting in settings()
    ]
    return _table(("YAML key", "flag", "variable", "default", "meaning"), rows)


def failure_table(sources: Iterable[Source]) -> str:
    return _table(("row", "what happens", "tests", "run"), rows_of_table(sources))


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple | list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def tables() -> dict[Path, tuple[str, str]]:
    """Page → name of its table, and what the table should be."""
    return {
        ROOT / "docs/metrics.md": ("metrics", metrics_table(read_sources(folders=PRODUCT_FOLDERS))),
        ROOT / "docs/configuration.md": ("settings", settings_table()),
        ROOT / "docs/kvstore.md": ("failure rows", failure_table(read_sources(folders=("tests",)))),
    }


def with_table(page: str, name: str, table: str) -> str:
    """`page` with the table `name` replaced. Raises ValueError if the page does not hold it exactly once."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)"
    changed, count = re.subn(pattern, lambda match: f"{match[1]}\n{table}\n{match[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the page holds {count} tables named {name}")
    return changed


if __name__ == "__main__":
    for path, (name, table) in tables().items():
        path.write_text(with_table(path.read_text(encoding="utf-8"), name, table), encoding="utf-8")

    from tests.deploy.generated_files import write_generated_files

    write_generated_files()
