"""The table of phases, walked in every order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.core.lifecycle import NEXT_PHASES, Lifecycle, Outcome, Phase


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
def test_every_request_can_end_whatever_it_is_doing(phase: Phase) -> None:
    ended = Lifecycle(phase).finish(Outcome.ABORT)
    assert (ended.phase, ended.outcome, ended.done) == (Phase.DONE, Outcome.ABORT, True)
    assert Phase.DONE in NEXT_PHASES[phase]


def test_nothing_leaves_done() -> None:
    ended = Lifecycle().finish(Outcome.STOP)
    for phase in Phase:
        with pytest.raises(AssertionError):
            ended.advance(phase)
    with pytest.raises(AssertionError):
        ended.finish(Outcome.STOP)


def test_a_request_does_not_end_without_a_reason() -> None:
    with pytest.raises(AssertionError):
        Lifecycle(Phase.DECODING).advance(Phase.DONE)


@pytest.mark.parametrize("origin", Phase)
@pytest.mark.parametrize("target", [phase for phase in Phase if phase is not Phase.DONE])
def test_a_request_moves_only_where_the_table_says(origin: Phase, target: Phase) -> None:
    if target in NEXT_PHASES[origin]:
        assert Lifecycle(origin).advance(target) == Lifecycle(target)
    else:
        with pytest.raises(AssertionError, match=f"{origin.name} -> {target.name}"):
            Lifecycle(origin).advance(target)


def test_a_preempted_request_waits_again_and_comes_back() -> None:
    request = Lifecycle()
    for phase in (Phase.LOADING, Phase.PREFILLING, Phase.DECODING, Phase.WAITING, Phase.LOADING, Phase.DECODING):
        request = request.advance(phase)
    assert request.finish(Outcome.LENGTH).outcome is Outcome.LENGTH


def test_every_phase_can_be_reached() -> None:
    reached, frontier = {Phase.WAITING}, [Phase.WAITING]
    while frontier:
        new = NEXT_PHASES[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(Phase)


@given(walk=st.lists(st.sampled_from([phase for phase in Phase if phase is not Phase.DONE]), max_size=20))
def test_an_outcome_is_there_exactly_when_the_request_is_done(walk: list[Phase]) -> None:
    request = Lifecycle()
    for phase in walk:
        if phase in NEXT_PHASES[request.phase]:
            request = request.advance(phase)
        assert request.outcome is None
        assert not request.done
    assert request.finish(Outcome.ERROR).outcome is Outcome.ERROR
