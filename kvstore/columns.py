"""Rows of columns: most often neighbours, whose rows are one slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def rows(column: Sequence[T], numbers: Sequence[int]) -> Sequence[T]:
    """Of `column`, in the order of `numbers`. Of a range, which counts by one, as quick as a slice."""
    if isinstance(numbers, range):
        assert numbers.step == 1, "a range of neighbours"
        return column[numbers.start : numbers.stop]
    return [column[number] for number in numbers]


def put_rows(column: bytearray, numbers: Sequence[int], values: bytes) -> None:
    """The opposite."""
    if isinstance(numbers, range):
        assert numbers.step == 1 and len(numbers) == len(values), "a value for each of some neighbours"
        column[numbers.start : numbers.stop] = values
    else:
        for number, value in zip(numbers, values, strict=True):
            column[number] = value


def joined(slices: Iterable[slice]) -> Sequence[int]:
    """All numbers in `slices`, ascending: a range if they follow each other."""
    all_ = list(slices)
    if all(before.stop == after.start for before, after in pairwise(all_)):
        return range(all_[0].start, all_[-1].stop)
    return [number for each in all_ for number in range(each.start, each.stop)]
