"""Finds the sizes that kernels are best launched with on this machine's GPU, and writes them as a table.

    python -m whalepod.kernels.tuning [--kernel NAME] [--rows N] [--out FILE]

a kernel's sizes, near those of today ─▶ each compiled and launched in processes of their own: what fails is dropped ─▶
each result held against today's: what differs is dropped ─▶ each timed in a graph ─▶ the best and today's again, in
turns ─▶ a line of the table, if it wins by GAIN_MIN

A kernel whose sizes change no bits must give today's bits; of the others only lines for `fast` change. Prints a line
for each number of rows, and last one JSON object: kernels, lines, changed, dropped. The table is written anew after
every kernel.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product, repeat
from math import isqrt
from pathlib import Path

import torch
import triton
from torch import Tensor

from whalepod.core.errors import ConfigError

from .graph_timing import calls_needed, calls_us, relative_error
from .kernel_names import name_by_source
from .launch_sizes import ANY, LaunchTable, Lines, Sizes, forced, repository_tables, sizes_by_shape, write_table
from .numerics import whole_batches
from .tunable_kernels import TUNABLES, Tunable
from .tuning_cases import Call, Case, cases

GAIN_MIN = 0.03
"""Less than this is within what one and the same kernel differs by from one measurement to the next."""
FINALISTS, FINAL_ROUNDS = 3, 3
QUICK_REPEATS, FINAL_REPEATS = 5, 15
CALLS_MIN = 4
ERROR_MAX = 4e-3
"""What another order of sums does to results in bfloat16, as a share of their norm."""


@dataclass(frozen=True, slots=True)
class Choice:
    sizes: Sizes
    us: float
    present_us: float


@dataclass(frozen=True, slots=True)
class Tuned:
    """A kernel at one number of rows."""

    case: Case
    rows: int
    present: Sizes
    choice: Choice
    tried: int
    dropped: int

    @property
    def changed(self) -> bool:
        return self.choice.sizes != self.present

    def __str__(self) -> str:
        shape = "" if self.case.shape == ANY else f" of shape {self.case.shape}"
        us, present_us = self.choice.us, self.choice.present_us
        return (
            f"{self.case.kernel}{shape}, {self.rows} rows: {present_us:.2f} → {us:.2f} µs (×{us / present_us:.3f}), "
            f"{self.dropped} of {self.tried} dropped; "
            + (f"{dict(self.present)} → {dict(self.choice.sizes)}" if self.changed else "stays")
        )


def candidates(tunable: Tunable, present: Sizes) -> list[Sizes]:
    """Sizes of which at most two differ from those of today; first those, then what differs least."""
    every = [dict(zip(tunable.sizes, values, strict=True)) for values in product(*tunable.sizes.values())]
    apart = [(sum(sizes[name] != present[name] for name in sizes), index) for index, sizes in enumerate(every)]
    return [every[index] for differ, index in sorted(apart) if differ <= 2]


def choose(present: Sizes, others: Sequence[Sizes], measure: Callable[[Sizes, int], float]) -> Choice:
    """`measure(sizes, repeats)` in µs. Of those that are quickest at first sight, that which is quickest when all take
    turns with `present`; `present`, unless it wins by GAIN_MIN."""
    first = sorted(((measure(sizes, QUICK_REPEATS), index) for index, sizes in enumerate(others)))
    finalists = [present, *(others[index] for _, index in first[:FINALISTS])]
    rounds = [[measure(sizes, FINAL_REPEATS) for sizes in finalists] for _ in range(FINAL_ROUNDS)]
    times = [sorted(times)[FINAL_ROUNDS // 2] for times in zip(*rounds, strict=True)]
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] * (1 + GAIN_MIN) > times[0]:
        best = 0
    return Choice(finalists[best], times[best], times[0])


def ranges(points: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """For ascending numbers of rows that are measured, from which number on, and below which, each stands for others:
    halfway to its neighbours, as factors go."""
    middles = [isqrt(low * high) + 1 for low, high in pairwise(points)]
    yield from zip([0, *middles], [*middles, None], strict=True)


def with_sizes(lines: Lines, low: int, high: int | None, sizes: Sizes) -> Lines:
    """Those, and from `low` rows on, below `high`, others."""
    kept = {rows: own for rows, own in zip(lines.rows_min, lines.sizes, strict=True) if rows < low}
    kept[low] = sizes
    if high is not None:
        kept[high] = lines.pick(high, exact=False)
        kept |= {rows: own for rows, own in zip(lines.rows_min, lines.sizes, strict=True) if rows > high}
    starts = [rows for rows in kept if rows == 0 or kept[rows] != kept[max(key for key in kept if key < rows)]]
    return replace(lines, rows_min=tuple(starts), sizes=tuple(kept[rows] for rows in starts))


def tune(kernels: Sequence[str], rows: Sequence[int], out: Path | None) -> dict[str, int]:
    """Measure `kernels` (none: all) at `rows` (none: those of `tuning_cases`), and write the table: to `out`, or to
    sm_90.json here. Raises ConfigError where that cannot be done."""
    if unknown := sorted(set(kernels) - set(TUNABLES)):
        raise ConfigError(f"{unknown[0]} is no kernel whose sizes are tuned; those are {', '.join(sorted(TUNABLES))}")
    if not torch.cuda.is_available():
        raise ConfigError("tuning needs a GPU, and torch finds none here (torch.cuda.is_available)")
    major, minor = torch.cuda.get_device_capability()
    architecture = 10 * major + minor
    listed = cases(major)
    chosen = [index for index, case in enumerate(listed) if not kernels or case.kernel in kernels]
    if not chosen:
        raise ConfigError(f"sm_{architecture} launches no kernel of {', '.join(kernels)}")
    name_by_source()  # so that what other processes compile is found here
    out = out or Path(f"sm_{architecture}.json")
    own = repository_tables().get(architecture)
    table = LaunchTable(architecture, _here(), {} if own is None else own.kernels)
    done: list[Tuned] = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        for index in chosen:
            case = listed[index]
            points = tuple(sorted({-(-number // case.rows_each) * case.rows_each for number in rows})) or case.rows

            def works(sizes: Sequence[Sizes], index: int = index, points: tuple[int, ...] = points) -> list[bool]:
                return list(pool.map(launches, repeat(major), repeat(index), repeat(points), sizes))

            shapes = table.kernels.get(case.kernel) or sizes_by_shape(architecture)[case.kernel]
            lines, tuned = tune_case(case, points, shapes.get(case.shape) or shapes[ANY], works=works)
            done += tuned
            table = replace(table, kernels={**table.kernels, case.kernel: {**shapes, case.shape: lines}})
            _write(table, out)
    _say(f"wrote {out}: `engine.launch_table_file` takes it")
    return {
        "kernels": len({one.case.kernel for one in done}),
        "lines": len(done),
        "changed": sum(one.changed for one in done),
        "dropped": sum(one.dropped for one in done),
    }


def tune_case(
    case: Case,
    points: Sequence[int],
    lines: Lines,
    *,
    works: Callable[[Sequence[Sizes]], Sequence[bool]],
    time_us: Callable[[Sequence[Call], int], float] = lambda calls, repeats: calls_us(calls, repeats=repeats),
) -> tuple[Lines, list[Tuned]]:
    """`lines` with what wins at `points`, for as many rows as are nearer to them than to others of the case. `works`:
    which sizes the kernel can be launched with. Where those of today cannot, the first that can take their place."""
    tunable, tuned = TUNABLES[case.kernel], list[Tuned]()
    near = {rows: candidates(tunable, lines.pick(rows, exact=False)) for rows in points}
    distinct = list({tuple(sizes.items()): sizes for some in near.values() for sizes in some}.values())
    run = [sizes for sizes, able in zip(distinct, works(distinct), strict=True) if able]
    known = sorted({*case.rows, *points})
    spans = dict(zip(known, ranges(known), strict=True))
    for rows in points:
        low, high = spans[rows]
        present, *others = [sizes for sizes in near[rows] if sizes in run] or [near[rows][0]]
        with whole_batches():
            calls = _calls(case, rows)
            wanted = _outputs(calls[0], case.kernel, present)
            same = [sizes for sizes in others if agrees(tunable, _outputs(calls[0], case.kernel, sizes), wanted)]

            def measure(sizes: Sizes, repeats: int, calls: Sequence[Call] = calls) -> float:
                with forced(case.kernel, **sizes):
                    return time_us(calls, repeats)

            choice = choose(present, same, measure)
        today, tried = near[rows][0], len(near[rows]) - 1
        if choice.sizes != today:
            lines = with_sizes(lines, low, high, choice.sizes)
        tuned.append(Tuned(case, rows, today, choice, tried=tried, dropped=tried - len(same)))
        _say(str(tuned[-1]))
        del calls, measure
        torch.cuda.empty_cache()
    return lines, tuned


def launches(major: int, index: int, points: tuple[int, ...], sizes: Sizes) -> bool:
    """In a process of its own: whether the kernel compiles for these sizes and can be launched."""
    name_by_source()
    case = cases(major)[index]
    try:
        with whole_batches(), forced(case.kernel, **sizes):
            for rows in points:
                _call(major, index, rows)()
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  of compiler, assembler or driver: the candidate is dropped
        _say(f"{case.kernel} {dict(sizes)}: {type(error).__name__} {str(error).strip().splitlines()[:1]}")
        return False
    return True


@lru_cache(maxsize=8)
def _call(major: int, index: int, rows: int) -> Call:
    return cases(major)[index].make(rows, 0)


def _calls(case: Case, rows: int) -> list[Call]:
    count = calls_needed(case.shared_bytes + rows * case.row_bytes, calls_min=CALLS_MIN)
    return [case.make(rows, seed) for seed in range(count)]


def _outputs(call: Call, kernel: str, sizes: Sizes) -> tuple[Tensor, ...]:
    """The second call's results come to lie where the first one's were spoilt: what it does not write shows."""
    with forced(kernel, **sizes):
        for part in _parts(call()):
            part.view(torch.uint8).fill_(0xFF)
        return _parts(call())


def _parts(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def agrees(tunable: Tunable, ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether results may take the place of those that are `wanted`."""
    if not tunable.changes_bits:
        return all(map(torch.equal, ours, wanted))
    return all(relative_error(own, other) <= ERROR_MAX for own, other in zip(ours, wanted, strict=True))


def _here() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def _write(table: LaunchTable, out: Path) -> None:
    new = out.with_name(out.name + ".new")
    new.write_text(write_table(table), encoding="utf-8")
    os.replace(new, out)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--rows", action="append", default=[], type=int, metavar="N", help="at so many; may be repeated"
    )
    parser.add_argument("--out", type=Path, help="the table to write; default: sm_90.json or the like, here")
    asked = parser.parse_args()
    try:
        figures = tune(asked.kernel, asked.rows, asked.out)
    except ConfigError as error:
        parser.error(str(error))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
