"""What a restore decides, from what was found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engine_world import tiny_model
from whalepod.engine.interface import Fidelity
from whalepod.engine.restore import Available, RestorePlan, SnapshotAt, Source, plan_restore

L = 300
FLOOR = 272


def _plan(available: Available, fidelity: Fidelity = Fidelity.EXACT, *, tokens: int = L) -> RestorePlan:
    return plan_restore(available, prompt_tokens=tokens, fidelity=fidelity, boundaries=tiny_model().boundaries)


def test_nothing_found_is_a_cold_request() -> None:
    for fidelity in Fidelity:
        plan = _plan(Available(blocks=0, blocks_exact=0), fidelity)
        assert (plan.boundary, plan.start, plan.window_start, plan.write_start, plan.exact) == (0, 0, 0, 0, True)


def test_fast_replays_a_window_and_is_approximate() -> None:
    plan = _plan(Available(blocks=17, blocks_exact=17), Fidelity.FAST)
    assert (plan.source, plan.boundary, plan.start, plan.exact) == (Source.REPLAY, 272, 256, False)
    assert (plan.window_start, plan.write_start, plan.replayed_tokens) == (256, 272, 16)


def test_fast_within_the_first_window_replays_everything_and_is_exact() -> None:
    plan = _plan(Available(blocks=1, blocks_exact=1), Fidelity.FAST)
    assert (plan.boundary, plan.start, plan.exact) == (16, 0, True)


def test_fast_takes_no_turn_snapshot_so_that_replay_follows_from_r_and_l_alone() -> None:
    turn = SnapshotAt(272, exact=True)
    with_turn = _plan(Available(blocks=17, blocks_exact=17, turn_snapshot=turn), Fidelity.FAST)
    assert with_turn == _plan(Available(blocks=17, blocks_exact=17), Fidelity.FAST)


def test_exact_resumes_at_a_turn_snapshot_without_replay() -> None:
    plan = _plan(Available(blocks=17, blocks_exact=17, turn_snapshot=SnapshotAt(272, exact=True)))
    assert (plan.source, plan.boundary, plan.start, plan.exact) == (Source.TURN_SNAPSHOT, 272, 272, True)
    assert plan.window_start == 272 - 15


def test_blocks_beyond_a_turn_snapshot_are_not_written_again() -> None:
    plan = _plan(Available(blocks=18, blocks_exact=18, turn_snapshot=SnapshotAt(272, exact=True)))
    assert (plan.source, plan.start, plan.write_start) == (Source.TURN_SNAPSHOT, 272, 288)


def test_exact_replays_the_halo_without_a_usable_turn_snapshot() -> None:
    unusable = (None, SnapshotAt(256, exact=True), SnapshotAt(272, exact=False))
    for turn in unusable:
        plan = _plan(Available(blocks=17, blocks_exact=17, turn_snapshot=turn))
        assert (plan.source, plan.boundary, plan.start, plan.exact) == (Source.REPLAY, 272, 272 - 105, True)


def test_the_halo_shrinks_as_the_kept_rows_leave_the_boundary() -> None:
    assert _plan(Available(blocks=17, blocks_exact=17), tokens=L + 5).replayed_tokens == 100
    assert _plan(Available(blocks=17, blocks_exact=17), tokens=L + 15).replayed_tokens == 90


def test_exact_uses_exact_blocks_only() -> None:
    plan = _plan(Available(blocks=17, blocks_exact=9))
    assert (plan.boundary, plan.write_start, plan.exact) == (144, 144, True)


def test_what_follows_an_approximate_block_is_approximate() -> None:
    own = SnapshotAt(300, exact=True)
    assert not _plan(Available(blocks=18, blocks_exact=3, own_snapshot=own), Fidelity.FAST).exact
    assert not _plan(Available(blocks=1, blocks_exact=0), Fidelity.FAST).exact


def test_an_own_snapshot_needs_all_blocks_below_it() -> None:
    own = SnapshotAt(300, exact=True)
    plan = _plan(Available(blocks=18, blocks_exact=18, own_snapshot=own))
    assert (plan.source, plan.start, plan.write_start, plan.exact) == (Source.OWN_SNAPSHOT, 300, 300, True)
    short = _plan(Available(blocks=17, blocks_exact=17, own_snapshot=own))
    assert (short.source, short.boundary) == (Source.REPLAY, 272)


def test_blocks_above_r_are_kept_and_not_written_again() -> None:
    plan = _plan(Available(blocks=18, blocks_exact=18))
    assert (plan.boundary, plan.write_start) == (272, 288)


def test_an_approximate_own_snapshot_is_none_for_exact() -> None:
    own = SnapshotAt(300, exact=False)
    assert _plan(Available(blocks=18, blocks_exact=18, own_snapshot=own)).source is Source.REPLAY
    fast = _plan(Available(blocks=18, blocks_exact=18, own_snapshot=own), Fidelity.FAST)
    assert (fast.source, fast.exact) == (Source.OWN_SNAPSHOT, False)


@given(
    blocks=st.integers(0, 18),
    exact=st.integers(0, 18),
    own=st.none() | st.integers(1, L),
    turn=st.none() | st.integers(1, 18),
    fidelity=st.sampled_from(Fidelity),
    flag=st.booleans(),
)
def test_every_plan_can_be_carried_out(
    blocks: int, exact: int, own: int | None, turn: int | None, fidelity: Fidelity, flag: bool
) -> None:
    available = Available(
        blocks=blocks,
        blocks_exact=min(blocks, exact),
        own_snapshot=SnapshotAt(own, flag) if own else None,
        turn_snapshot=SnapshotAt(16 * turn, flag) if turn else None,
    )
    plan = _plan(available, fidelity)
    assert 0 <= plan.start <= plan.boundary
    assert plan.window_start <= plan.start
    # Global rows are there up to where writing begins, but for the unfinished block that a snapshot brings.
    assert plan.write_start // 16 <= blocks
    assert plan.source is Source.OWN_SNAPSHOT or plan.boundary <= FLOOR
    assert plan.exact or fidelity is Fidelity.FAST
