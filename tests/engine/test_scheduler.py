"""Planning: pure, fair, within its budgets; and who is preempted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engine_world import prompt_of
from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.core.lifecycle import Phase
from whalepod.engine.block_pool import BlockPool, SlotPool
from whalepod.engine.finish import FinishRule
from whalepod.engine.interface import EngineRequest, Fidelity
from whalepod.engine.sampling import Sampler
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.scheduler import Scheduler, StepLimits, StepPlan, chunk_end, plan_admission, plan_step
from whalepod.engine.sequence import Sequence

LIMITS = StepLimits(chunk_tokens=32, chunk_tokens_beside_decode=8, group_tokens=2, block_tokens=16)


def _sequence(
    arrival: int, *, prompt: int = 40, output: int = 0, computed: int = 0, blocks: int = 0, priority: int = 0
) -> Sequence:
    """Waiting if it has no blocks; else decoding if it has output, prefilling if not."""
    params, tokens = SamplingParams(), list(prompt_of(prompt + output))
    request = EngineRequest(
        RequestId(bytes([arrival]) * 16),
        1,
        tokens[:prompt],
        params,
        Fidelity.FAST,
        Deadline.after(100),
        priority=priority,
    )
    sequence = Sequence(
        request=request,
        arrival=arrival,
        prompt_tokens=prompt,
        rows_end=len(tokens),
        tokens=tokens,
        hashes=[],
        sampler=Sampler(params, key=0, eos_id=1, prompt_ids=()),
        finish_rule=FinishRule(params, prompt, 1000, 1),
        blocks=(0,) * blocks,
        computed=computed,
    )
    if blocks:
        sequence.advance(Phase.DECODING if output else Phase.PREFILLING)
    return sequence


def _decoding(arrival: int, tokens: int, *, blocks: int) -> Sequence:
    return _sequence(arrival, prompt=tokens - 1, output=1, computed=tokens - 1, blocks=blocks)


def _plan(*holding: Sequence, blocks_free: int = 10, stops: tuple[int, ...] = ()) -> StepPlan:
    return plan_step(
        holding,
        blocks_free=blocks_free,
        blocks_released=lambda sequence: len(sequence.blocks),
        stops=lambda _: stops,
        limits=LIMITS,
    )


def _shape(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, int]]]:
    return (
        [sequence.arrival for sequence in plan.preempt],
        [(rows.sequence.arrival, rows.end - rows.sequence.computed, rows.new_blocks) for rows in plan.rows],
    )


def test_every_decoding_sequence_gets_its_row_before_any_chunk() -> None:
    first, second = _sequence(1, blocks=3), _decoding(2, 20, blocks=2)
    assert _shape(_plan(first, second)) == ([], [(2, 1, 0), (1, 8, 0)])


def test_without_decode_rows_a_chunk_may_be_long_and_the_next_prompt_gets_the_rest() -> None:
    first, second = _sequence(1, prompt=24, blocks=2), _sequence(2, prompt=40, blocks=3)
    assert _shape(_plan(first, second)) == ([], [(1, 24, 0), (2, 8, 0)])


def test_a_long_recompute_beside_decode_rows_takes_its_budget_only() -> None:
    recompute = _sequence(1, prompt=500, blocks=32)
    rows = [rows for rows in _plan(recompute, _decoding(2, 20, blocks=2)).rows if rows.sequence is recompute]
    assert [planned.end for planned in rows] == [LIMITS.chunk_tokens_beside_decode]


def test_chunks_end_at_stops_and_else_at_whole_groups() -> None:
    sequence = _sequence(1, prompt=41, blocks=3)
    ends: list[int] = []
    while sequence.rows_pending:
        sequence.computed = chunk_end(sequence, stops=(16, 32), budget=7, group_tokens=2)
        ends.append(sequence.computed)
    assert ends == [6, 12, 16, 22, 28, 32, 38, 41]


def test_a_chunk_that_starts_inside_a_group_ends_at_one() -> None:
    sequence = _sequence(1, prompt=41, computed=13, blocks=3)
    assert chunk_end(sequence, stops=(), budget=4, group_tokens=2) == 16
    assert chunk_end(sequence, stops=(), budget=0, group_tokens=2) == 13


@given(
    prompt=st.integers(1, 200),
    stops=st.lists(st.integers(1, 220), unique=True).map(sorted),
    budget=st.integers(2, 50),
)
def test_any_budget_of_a_group_or_more_finishes_every_prompt(prompt: int, stops: list[int], budget: int) -> None:
    sequence = _sequence(1, prompt=prompt, blocks=20)
    while sequence.rows_pending:
        end = chunk_end(sequence, stops=stops, budget=budget, group_tokens=2)
        assert sequence.computed < end <= min(sequence.computed + budget, prompt)
        assert not [stop for stop in stops if sequence.computed < stop < end]
        sequence.computed = end


def test_a_row_that_needs_a_block_takes_a_free_one() -> None:
    assert _shape(_plan(_decoding(1, 17, blocks=1), blocks_free=1)) == ([], [(1, 1, 1)])


def test_the_latest_arrival_makes_room_for_those_before_it() -> None:
    first, second, third = _decoding(1, 17, blocks=1), _decoding(2, 20, blocks=2), _sequence(3, blocks=3)
    assert _shape(_plan(first, second, third, blocks_free=0)) == ([3], [(1, 1, 1), (2, 1, 0)])


def test_nobody_is_preempted_for_one_that_came_later() -> None:
    first, second = _decoding(1, 20, blocks=2), _decoding(2, 17, blocks=1)
    assert _shape(_plan(first, second, blocks_free=0)) == ([2], [(1, 1, 0)])


def test_a_sequence_that_is_loading_can_be_preempted() -> None:
    loading = _sequence(2)
    loading.blocks = (0, 0)
    loading.advance(Phase.LOADING)
    assert _shape(_plan(_decoding(1, 17, blocks=1), loading, blocks_free=0)) == ([2], [(1, 1, 1)])


def test_a_prompt_whose_handoff_is_being_written_is_left_alone() -> None:
    leaving = _sequence(3, prompt=40, computed=40, blocks=3)
    first, second = _decoding(1, 17, blocks=1), _decoding(2, 20, blocks=2)
    assert _shape(_plan(first, second, leaving, blocks_free=0)) == ([2], [(1, 1, 1)])


def test_planning_changes_nothing() -> None:
    sequences = [_decoding(1, 17, blocks=1), _decoding(2, 33, blocks=2), _sequence(3, blocks=3)]
    before = [(list(s.blocks), s.computed, s.phase, list(s.tokens)) for s in sequences]
    assert _plan(*sequences, blocks_free=1) == _plan(*sequences, blocks_free=1)
    assert [(list(s.blocks), s.computed, s.phase, list(s.tokens)) for s in sequences] == before


def _admitted(*waiting: Sequence, slots: int = 1, blocks: int = 5, anyone: bool = True) -> int | None:
    sequence = plan_admission(
        waiting,
        slots_free=slots,
        blocks_free=blocks,
        blocks_watermark=1,
        blocks_wanted=lambda sequence: -(-sequence.rows_end // 16),
        anyone_holds=anyone,
    )
    return None if sequence is None else sequence.arrival


def test_the_first_waiting_request_is_admitted_if_it_fits_beside_the_watermark() -> None:
    assert _admitted(_sequence(1, prompt=64), _sequence(2)) == 1
    assert _admitted(_sequence(1, prompt=65), _sequence(2)) is None
    assert _admitted(_sequence(1, prompt=64), slots=0) is None


def test_a_short_request_does_not_overtake_one_that_does_not_fit() -> None:
    assert _admitted(_sequence(1, prompt=200), _sequence(2, prompt=1)) is None


def test_who_runs_alone_may_take_everything() -> None:
    assert _admitted(_sequence(1, prompt=80), anyone=False) == 1
    assert _admitted(_sequence(1, prompt=80), anyone=True) is None


def test_a_request_that_awaits_its_handoff_is_passed_by() -> None:
    waiting = _sequence(1)
    waiting.awaiting = True
    assert _admitted(waiting, _sequence(2)) == 2


def _scheduler(blocks: int = 8, slots: int = 2) -> Scheduler:
    return Scheduler(blocks=BlockPool(blocks), slots=SlotPool(slots), limits=LIMITS, stops=lambda _: ())


def test_a_preempted_sequence_waits_in_its_old_place_and_holds_nothing() -> None:
    scheduler = _scheduler()
    first, second, third = (_sequence(arrival) for arrival in (1, 2, 3))
    for sequence in (first, second, third):
        scheduler.add(sequence)
    for sequence in (first, second):
        scheduler.apply_admission(sequence, ())
        sequence.advance(Phase.PREFILLING)
    generation = second.owner.generation
    scheduler.apply_preemption(second)
    scheduler.check()
    assert [sequence.arrival for sequence in scheduler.waiting] == [2, 3]
    assert (second.slot, second.blocks, second.phase) == (None, (), Phase.WAITING)
    scheduler.apply_admission(second, ())
    assert second.owner.generation != generation


def test_a_smaller_priority_is_admitted_first_and_preempted_last() -> None:
    scheduler = _scheduler(blocks=8)
    for arrival, priority in ((1, 0), (2, -1), (3, 5), (4, 0)):
        scheduler.add(_sequence(arrival, prompt=32, output=1, computed=32, priority=priority))
    assert [sequence.arrival for sequence in scheduler.waiting] == [2, 1, 4, 3]
    for wanted in (2, 1):
        admitted = scheduler.plan_admission(lambda _: ())
        assert admitted is not None
        assert admitted.arrival == wanted
        scheduler.apply_admission(admitted, ())
        admitted.advance(Phase.DECODING)
    assert [sequence.arrival for sequence in scheduler.holding] == [2, 1]
    assert _shape(_plan(*scheduler.holding, blocks_free=0)) == ([], [(2, 1, 0), (1, 1, 0)])
    for sequence in scheduler.holding:
        sequence.blocks = sequence.blocks[:2]
    preempted, _ = _shape(_plan(*scheduler.holding, blocks_free=0))
    assert preempted == [1]
    scheduler.apply_preemption(scheduler.holding[1])
    assert [sequence.arrival for sequence in scheduler.waiting] == [1, 4, 3]


def test_removing_a_sequence_anywhere_gives_everything_back() -> None:
    scheduler = _scheduler()
    waiting, holding = _sequence(1), _sequence(2)
    scheduler.add(waiting)
    scheduler.add(holding)
    scheduler.apply_admission(holding, ())
    scheduler.remove(waiting)
    scheduler.remove(holding)
    scheduler.check()
    assert (scheduler.blocks.blocks_free, scheduler.slots.slots_free) == (8, 2)


def test_shared_blocks_that_others_hold_make_admission_cheaper() -> None:
    scheduler = _scheduler(blocks=5)
    first, second = _sequence(1, prompt=48), _sequence(2, prompt=48)
    scheduler.add(first)
    scheduler.apply_admission(first, ())
    scheduler.add(second)
    assert scheduler.plan_admission(lambda _: ()) is None
    shared = first.blocks[:2]
    assert scheduler.plan_admission(lambda _: shared) is second
    scheduler.apply_admission(second, shared)
    scheduler.check()
    assert scheduler.blocks.blocks_free == 1
