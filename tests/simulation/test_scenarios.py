"""What a seed has found, told as a story."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.network import Weather
from tests.simulation.plans import Ask, Event, Plan, Trouble
from tests.simulation.report import report_of
from tests.simulation.world import run_plan
from whalepod.engine.interface import Fidelity
from whalepod.engine.options import RankOptions
from whalepod.engine.sampling_params import SamplingParams

RANK = RankOptions(slots=2, blocks=40, chunk_tokens=64, context_tokens_max=208, async_scheduling=False)
ASK = Ask(
    name="first",
    at_s=0.2,
    router=0,
    tenant="whale",
    cache_salt="",
    prompt=tuple(range(3, 43)),
    sampling=SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    fidelity=Fidelity.EXACT,
    streams=True,
    timeout_s=20.0,
)


def test_requests_wait_for_the_successor_of_a_rank_that_had_nothing_to_do_when_it_drained() -> None:
    """It was gone before its router asked how it was."""
    plan = Plan(
        seed=1,
        routers=1,
        encoders=False,
        prefill=[RANK],
        decode=[RANK],
        weather=Weather(),
        store_rates={},
        store_s=(0.0002, 0.002),
        asks=[ASK, replace(ASK, name="second", at_s=2.0), replace(ASK, name="third", at_s=2.1, over_http=True)],
        events=[Event(at_s=1.1, trouble=Trouble.DRAIN, rank=1, router=0, lasts_s=4.0)],
    )
    outcome = run_plan(plan)
    assert not outcome.wrong, report_of(outcome)
    assert all(answer.ok for answer in outcome.answers[:3])
