"""Which test plays which row of the store's failure table: its name says so, as in `test_f15_f16_…`. And which plays a
fault that users of other systems met, as in `test_e10_…`, and with the letter of the store's rows `test_fault_f2_…`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from tests.house_rules import Source

ROWS: Mapping[int, str] = {
    1: "absent at start",
    2: "dies under load",
    3: "slow, not dead",
    4: "away from a disaggregated cluster",
    5: "full (`OOM`)",
    6: "`READONLY`: a primary has become a replica",
    7: "`MOVED`, `ASK`",
    8: "`TRYAGAIN`, redirections inside a batch",
    9: "`LOADING`, `CLUSTERDOWN`, `MASTERDOWN`, too many clients",
    10: "`BUSY`, `NOSCRIPT`",
    11: "`NOAUTH`, `WRONGPASS`, `NOPERM`",
    12: "timeout in a reply, reset, unasked bytes",
    13: "a fail-over loses the last writes",
    15: "evicted between lookup and fetch",
    16: "a hole inside a prefix",
    17: "wrong bytes, length, header, identity or type",
    18: "a version or format of a newer peer",
    22: "hand-offs that are abandoned",
    24: "two writers of one block",
    26: "ranks with another layout or model",
    27: "a snapshot of another kind",
    28: "a writer that is revoked",
    29: "a tenant that is deleted",
    32: "fragmentation",
    33: "one hot run",
    34: "nothing can be evicted",
    35: "a value above the limit",
    36: "the whole store restarts empty",
}
"""By their numbers in the specification, with what happens to the store."""

FAULTS: Mapping[str, tuple[int, ...]] = {
    "a": (1, 2, 3, 4, 5, 6, 7, 8, 10, 13, 14, 16, 18, 19),
    "b": (1, 2, 4, 5, 7, 9),
    "d": (1, 2, 4, 5, 7, 9, 10, 11, 13),
    "e": (1, 2, 5, 7, 8, 10, 11, 13, 14, 15),
    "fault_f": (2, 3, 4, 10, 12, 13, 14),
}
"""Of hand-offs, of tokens, of routing, of answers, of operation."""


@dataclass(frozen=True, slots=True)
class RowTest:
    row: int
    file: str
    sentence: str
    slow: bool


def row_tests(sources: Iterable[Source]) -> list[RowTest]:
    return [found for source in sources for found in _of_file(source)]


def faults_tested(sources: Iterable[Source]) -> set[str]:
    """Those that a test is named after, as `a1` and `fault_f2`."""
    names = (node.name for source in sources for node in source.nodes if _is_function(node))
    groups = (re.match(r"test((?:_(?:fault_f|[abde])\d+)+)_", name) for name in names)
    return {fault[1:] for group in groups if group for fault in re.findall(r"_(?:fault_f|[abde])\d+", group[1])}


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _of_file(source: Source) -> Iterator[RowTest]:
    whole_file_is_slow = any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "pytestmark"
        and "mark.slow" in ast.unparse(node)
        for node in source.nodes
    )
    for node in source.nodes:
        if not _is_function(node):
            continue
        named = re.match(r"test((?:_f\d+)+)_(.+)", node.name)
        if named is not None:
            slow = whole_file_is_slow or any("mark.slow" in ast.unparse(mark) for mark in node.decorator_list)
            for row in re.findall(r"\d+", named[1]):
                yield RowTest(int(row), str(source.path), named[2].replace("_", " "), slow)


def rows_of_table(sources: Iterable[Source]) -> list[tuple[str, str, str, str]]:
    """Row, what happens, tests by file, and what runs them: `make test` (T), `make test-all` (A) or both."""
    tests = row_tests(sources)
    table: list[tuple[str, str, str, str]] = []
    for row, happens in ROWS.items():
        ours = [test for test in tests if test.row == row]
        files = sorted({test.file for test in ours})
        cell = "; ".join(
            f"`{file}`: " + ", ".join(sorted({test.sentence for test in ours if test.file == file})) for file in files
        )
        runs = " ".join(letter for letter, slow in (("T", False), ("A", True)) if any(t.slow is slow for t in ours))
        table.append((f"F{row}", happens, cell, runs))
    return table
