"""Times the kernels at the released model's shapes, checks them, and prints one table.

    python benchmarks/kernels.py [--json] [--only NAME]

Needs a GPU. `--json` prints one object a row instead, with the fields of `measuring.Row`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module

from kernel_cases.measuring import Row

from whalepod.kernels.numerics import whole_batches

CASES = (
    "sparse_attention",
    "packed_index_scores",
    "top_entries",
    "candidates",
    "mhc",
    "attention_rows",
    "pointwise",
    "products",
    "sampling",
    "tilelang",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a row")
    parser.add_argument("--only", choices=CASES, action="append", help="this operation; may be repeated")
    options = parser.parse_args()
    rows: list[Row] = []
    for measured in _rows(options.only or CASES):
        rows.append(measured)
        if options.json:
            print(json.dumps(asdict(measured)), flush=True)
    if not options.json:
        print(_table(rows))


def _rows(cases: tuple[str, ...] | list[str]) -> Iterator[Row]:
    for case in cases:
        with whole_batches():
            yield from import_module(f"kernel_cases.{case}").rows()


def _table(rows: list[Row]) -> str:
    lines = [
        f"{'kernel':24} {'shape':34} {'µs':>9} {'bound':>8} {'×':>6} {'in graph':>9} {'×':>6} {'copy':>7} "
        f"{'error':>8}  peer"
    ]
    for line in rows:
        error = "equal" if line.error is None else f"{line.error:.1e}"
        peer = "" if line.peer is None else f"{line.peer} {_figure(line.peer_us, 1)}"
        lines.append(
            f"{line.kernel:24} {line.shape:34} {line.us:9.1f} {line.bound_us:8.1f} {line.ratio:6.2f} "
            f"{_figure(line.in_graph_us, 1):>9} {_figure(line.in_graph_ratio, 2):>6} "
            f"{_figure(line.copy_in_graph_us, 1):>7} {error:>8}  {peer}"
        )
    return "\n".join(lines)


def _figure(value: float | None, places: int) -> str:
    return "" if value is None else f"{value:.{places}f}"


if __name__ == "__main__":
    main()
