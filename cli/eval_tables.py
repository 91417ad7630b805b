"""The figures of `whalepod eval` as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

Figures = Mapping[str, Any]


def tables(figures: Figures) -> Iterator[Table]:
    """One for each part that was measured."""
    if "by_kind" in figures:
        yield _loss(figures["by_kind"])
    costs = [row for row in _COSTS if row[0] in figures]
    if costs or "engram_zeroed" in figures.get("ablations", {}):
        yield _costs(figures, costs)
    if figures.get("recall"):
        yield _recall(figures)
    if figures.get("json") or figures.get("tool_calls"):
        yield _formats(figures)
    if "accepted_length" in figures:
        yield _drafts(figures)
    if "tokens_per_second" in figures:
        yield _speed(figures["tokens_per_second"])


_COSTS = (
    ("fp4_cost", "FP4 caches, against fp32"),
    ("bounded_replay_cost", "bounded replay after a hit, against exact"),
    ("compact_cost", "compact prefill, against off"),
)


def _loss(by_kind: Figures) -> Table:
    table = _table("Held-out text", "kind", "tokens", "nats a token", "bits a byte", "5-gram, bits a byte")
    for kind, values in by_kind.items():
        table.add_row(
            kind,
            f"{values['tokens']}",
            f"{values['nats_per_token']:.3f}",
            f"{values['bits_per_byte']:.3f}",
            f"{values['bits_per_byte_5gram']:.3f}" if "bits_per_byte_5gram" in values else "",
        )
    return table


def _costs(figures: Figures, costs: Sequence[tuple[str, str]]) -> Table:
    table = _table("What it costs in loss", "", "cost", "±")
    for name, label in costs:
        table.add_row(label, _percent(figures[name]), _percent(figures.get(f"{name}_error"), signed=False))
    ablations = figures.get("ablations", {})
    for name, label in (("engram_zeroed", "without n-gram memory"), ("newest_entries", "newest entries, not the best")):
        values = ablations.get(name)
        if values is not None:
            table.add_row(label, _percent(values["loss_cost"]), _percent(values["loss_cost_error"], signed=False))
            if values.get("loss_cost_where_it_chooses") is not None:
                table.add_row("  where there is a choice", _percent(values["loss_cost_where_it_chooses"]), "")
    return table


def _recall(figures: Figures) -> Table:
    ways = dict(figures["recall"])
    newest = figures.get("ablations", {}).get("newest_entries", {}).get("recall")
    if newest is not None:
        ways["newest_entries"] = newest
    distances = list(dict.fromkeys(d for way in ways.values() for d in way["by_distance"]))
    table = _table("Facts recalled, by tokens between fact and question", "", *(f"≤ {d}" for d in distances), "all")
    for name, values in ways.items():
        shares = [values["by_distance"].get(distance) for distance in distances]
        table.add_row(_words(name), *("" if share is None else _share(share) for share in shares), _share(values))
    return table


def _formats(figures: Figures) -> Table:
    table = _table("Answers at temperature 0", "", "valid JSON", "right", "valid tool calls", "right")
    kinds = [figures.get(kind, {}) for kind in ("json", "tool_calls")]
    for name in dict.fromkeys(name for kind in kinds for name in kind):
        cells = [_share(kind[name], which) for kind in kinds if name in kind for which in ("valid", "right")]
        table.add_row(_words(name), *cells)
    return table


def _drafts(figures: Figures) -> Table:
    drafted = figures["drafted"]
    table = _table(f"Drafts, {drafted['answers']} answers at temperature {drafted['temperature']:g}", "", "")
    table.add_row("tokens a step, the network's own included", f"{figures['accepted_length']:.2f}")
    markov = figures.get("ablations", {}).get("markov_zeroed")
    if markov is not None:
        table.add_row("  without Markov head", f"{markov['accepted_length']:.2f}")
    table.add_row("stands, by place", " ".join(f"{value:.2f}" for value in figures["acceptance"]))
    calibrated = f"{figures['ece']:.3f} calibrated" if drafted["calibrated"] else "no calibration is beside this model"
    table.add_row("error of confidences", f"{figures['ece_before']:.3f} as they are, {calibrated}")
    return table


def _speed(by_requests: Figures) -> Table:
    ways = list(next(iter(by_requests.values())))
    table = _table("Tokens a second, by drafts a step", "requests at a time", *ways)
    for requests, rates in by_requests.items():
        table.add_row(requests, *(f"{rates[way]:.1f}" for way in ways))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    return table


def _percent(value: float | None, *, signed: bool = True) -> str:
    return "" if value is None else f"{value:{'+' if signed else ''}.2%}"


def _share(values: Figures, which: str = "right") -> str:
    return f"{values[which]} of {values['asked']}"


def _words(name: str) -> str:
    return name.replace("_", " ")
