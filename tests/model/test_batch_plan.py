"""Index tensors of a forward, compared with what they mean."""

from __future__ import annotations

import numpy as np
import pytest

from tests.model.network_world import PLAIN, golden_config
from whalepod.kernels.native import library
from whalepod.kernels.numerics import ROW_TILE
from whalepod.model.batch import Segment
from whalepod.model.batch_plan import BatchPlan, EntryPlan, WindowPlan
from whalepod.model.caches import Caches
from whalepod.model.rows import Ints, Rows

CONFIG = golden_config()
CACHES = Caches.allocate(CONFIG, blocks=12, slots=3, formats=PLAIN)


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def segment(slot: int, start: int, tokens: int, **fields: object) -> Segment:
    values = {"slot": slot, "block_table": [slot * 4 + block for block in (2, 0, 3, 1)], "start": start}
    return Segment(**(values | {"token_ids": range(tokens), "history": ()} | fields))  # type: ignore[arg-type]


def test_rows_are_padded_to_whole_tiles_by_their_last() -> None:
    with library.chosen(wanted=False):
        rows = Rows.between(ints(5, 0, 40), ints(7, 0, 43))
    assert rows.count == 5
    assert rows.positions.tolist() == [5, 6, 40, 41, 42] + [42] * (ROW_TILE - 5)
    assert rows.segments.tolist() == [0, 0, 2, 2, 2] + [2] * (ROW_TILE - 5)
    assert rows.slices() == [slice(0, 2), slice(2, 2), slice(2, ROW_TILE)]
    assert Rows.between(ints(3), ints(3)).positions.tolist() == []


@pytest.mark.skipif(not library.available(), reason=f"no compiled operators: {library.REASON_MISSING}")
def test_operators_take_rows_without_padding() -> None:
    with library.chosen(wanted=True):
        assert Rows.between(ints(5, 40), ints(7, 43)).positions.tolist() == [5, 6, 40, 41, 42]


@pytest.mark.parametrize(("start", "end", "low"), [(0, 3, 0), (0, 30, 0), (25, 26, 0), (25, 60, 20), (25, 60, 30)])
def test_a_query_sees_the_window_up_to_itself_and_down_to_its_low(start: int, end: int, low: int) -> None:
    window, ring, slot = 4, 6, 2
    rows = Rows.between(ints(start), ints(end))
    plan = WindowPlan.build(rows, rows, ints(low), ints(slot), window=window, ring_rows=ring)
    # What the pool would hold, as positions: nothing, the rows before the segment, the segment's.
    pool = [None, *range(start - window + 1, start), *range(start, end)]
    for query, index in enumerate(plan.index[: rows.count].tolist()):
        position = start + query
        wanted = [p if p >= max(low, 0) else None for p in range(position - window + 1, position + 1)]
        assert [pool[i] for i in index] == wanted
    assert plan.previous.tolist() == [slot * ring + p % ring for p in range(start - window + 1, start)]
    kept = list(range(max(start, end - ring), end))
    assert plan.write_rows.tolist() == [p - start for p in kept]
    assert plan.write_slots.tolist() == [slot * ring + p % ring for p in kept]


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize(
    ("start", "end", "write_start"), [(0, 1, 0), (0, 9, 0), (3, 4, 0), (3, 17, 0), (4, 20, 8), (5, 6, 9)]
)
def test_entries_are_those_whose_last_token_is_computed_and_may_be_written(
    ratio: int, start: int, end: int, write_start: int
) -> None:
    rows, tables = Rows.between(ints(start), ints(end)), np.array([[7, 3]])
    plan = EntryPlan.build(rows, tables, ints(write_start), ints(1), ratio=ratio, block_tokens=16, ring_rows=10)
    pool = [*range(start - ratio + 1, start), *range(start, end)]
    last_tokens = [p for p in range(start, end) if p % ratio == ratio - 1 and p >= write_start]
    assert [[pool[i] for i in members] for members in plan.members.tolist()] == [
        list(range(last - ratio + 1, last + 1)) for last in last_tokens
    ]
    assert plan.positions.tolist() == [last - ratio + 1 for last in last_tokens]
    per_block = 16 // ratio
    entries = [last // ratio for last in last_tokens]
    assert plan.destinations.tolist() == [tables[0, e // per_block] * per_block + e % per_block for e in entries]


def test_kept_rows_are_those_at_and_above_the_floor() -> None:
    segments = [segment(0, 0, 20, floor=15), segment(1, 30, 4, floor=40), segment(2, 9, 3, floor=2)]
    plan = BatchPlan.build(segments, CONFIG, CACHES)
    assert plan.every.count == 27
    assert plan.kept.count == 5 + 3
    assert plan.kept_index is not None
    assert plan.kept_index.tolist()[:8] == [15, 16, 17, 18, 19, 24, 25, 26]


def test_layers_above_the_last_source_see_no_window_row_below_the_floor() -> None:
    plan = BatchPlan.build([segment(0, 20, 8, floor=18)], CONFIG, CACHES)
    assert plan.kept_index is None
    seen = (plan.gather.upper_window.index > 0).sum(dim=1).tolist()
    assert seen == [3, 4, 5, 6, 7, 8, 9, 10]
    assert (plan.gather.source_window.index > 0).sum(dim=1).tolist() == [16] * 8


def test_logits_are_of_the_rows_that_asked_for_them() -> None:
    segments = [
        segment(0, 0, 6, logits_start=4),
        segment(1, 0, 6),
        segment(2, 0, 6, logits_start=1, floor=5),
    ]
    plan = BatchPlan.build(segments, CONFIG, CACHES)
    assert plan.logit_rows.tolist() == [4, 5, 12]


def test_a_table_that_does_not_reach_the_last_row_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="4 blocks"):
        BatchPlan.build([segment(0, 60, 5)], CONFIG, CACHES)
