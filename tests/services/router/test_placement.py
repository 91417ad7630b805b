"""Placement is a function of what is known: load, fit, stored prefix, who failed before."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId
from whalepod.engine.interface import Fidelity, RankLoad
from whalepod.services.router.placement import (
    Candidate,
    Costs,
    Placement,
    PlacementRequest,
    PlacementRules,
    Policy,
    RemotePrefill,
    plan_placement,
)


def candidate(name: str, **changes: object) -> Candidate:
    idle = Candidate(
        rank_id=RankId(name),
        load=RankLoad(slots_total=8, blocks_free=100, blocks_total=100),
        context_tokens_max=4096,
        fidelities=(Fidelity.FAST, Fidelity.EXACT),
    )
    return replace(idle, **changes)


def place(
    decode: list[Candidate],
    prefill: list[Candidate] | None = None,
    *,
    prompt_tokens: int = 1000,
    stored_tokens: int = 0,
    fidelity: Fidelity = Fidelity.FAST,
    avoid: tuple[str, ...] = (),
    remote_prefill: RemotePrefill = RemotePrefill.AUTO,
    policy: Policy = Policy.KV,
    costs: Costs | None = None,
    seed: int = 0,
    **known: Any,
) -> Placement:
    request = PlacementRequest(prompt_tokens, stored_tokens, fidelity, tuple(RankId(name) for name in avoid), **known)
    return plan_placement(
        request,
        decode=decode,
        prefill=prefill or [],
        rules=PlacementRules(policy, remote_prefill, remote_prefill_tokens_min=64),
        costs=costs or Costs(),
        rng=Random(seed),
    )


D0, D1, P0, P1 = (candidate(name) for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"))


def test_without_a_decode_rank_nothing_can_run() -> None:
    with pytest.raises(UnavailableError):
        place([], [P0])


@pytest.mark.parametrize("policy", Policy)
def test_the_decode_rank_that_a_client_names_is_taken_while_it_is_there(policy: Policy) -> None:
    busy, wanted = candidate("decode-1", requests_here=7, prefill_tokens_here=5000), RankId("decode-1")
    for seed in range(8):
        assert place([D0, busy], policy=policy, seed=seed, wanted_rank=wanted).decode == "decode-1"
        assert place([D0, busy], [P0], policy=policy, seed=seed, wanted_rank=wanted).decode == "decode-1"
    assert place([D0, busy], policy=policy, avoid=("decode-1",), wanted_rank=wanted).decode == "decode-0"
    short = candidate("decode-1", context_tokens_max=100)
    assert place([D0, short], policy=policy, wanted_rank=wanted).decode == "decode-0"


def test_the_less_loaded_decode_rank_is_taken() -> None:
    busy = replace(D0, requests_elsewhere=6)
    assert {place([busy, D1], seed=seed).decode for seed in range(20)} == {"decode-1"}


def test_a_rank_short_of_blocks_counts_as_loaded() -> None:
    full = replace(D0, load=RankLoad(slots_total=8, blocks_free=1, blocks_total=100))
    assert {place([full, D1], seed=seed).decode for seed in range(20)} == {"decode-1"}


def test_own_dispatches_count_before_any_report_shows_them() -> None:
    just_given = replace(D0, requests_here=4)
    assert {place([just_given, D1], seed=seed).decode for seed in range(20)} == {"decode-1"}


def test_d4_a_burst_between_two_reports_spreads_evenly() -> None:
    rng = Random(7)
    counts: Counter[str] = Counter({f"decode-{index}": 0 for index in range(8)})
    for _ in range(64):
        ranks = [candidate(name, requests_here=count) for name, count in counts.items()]
        counts[place(ranks, prompt_tokens=10, seed=rng.randrange(1 << 30)).decode] += 1
    assert max(counts.values()) - min(counts.values()) <= 1


def test_routers_that_share_nothing_do_not_all_choose_the_same_of_equals() -> None:
    chosen = Counter(place([D0, D1], seed=seed).decode for seed in range(200))
    assert min(chosen.values()) > 60


@pytest.mark.parametrize(
    ("prompt_tokens", "stored_tokens", "remote_prefill", "remote"),
    [
        (63, 0, RemotePrefill.AUTO, False),
        (64, 0, RemotePrefill.AUTO, True),
        (1000, 992, RemotePrefill.AUTO, False),
        (1000, 512, RemotePrefill.AUTO, True),
        (1, 0, RemotePrefill.ALWAYS, True),
        (4000, 0, RemotePrefill.NEVER, False),
    ],
)
def test_a_prefill_rank_runs_what_is_worth_it(
    prompt_tokens: int, stored_tokens: int, remote_prefill: RemotePrefill, remote: bool
) -> None:
    placement = place(
        [D0], [P0], prompt_tokens=prompt_tokens, stored_tokens=stored_tokens, remote_prefill=remote_prefill
    )
    assert placement == Placement(RankId("decode-0"), RankId("prefill-0") if remote else None)


def test_the_least_loaded_policy_ignores_what_is_stored() -> None:
    assert place([D0], [P0], stored_tokens=992).prefill is None
    assert place([D0], [P0], stored_tokens=992, policy=Policy.LEAST_LOADED).prefill == "prefill-0"


def test_the_prefill_rank_with_the_shorter_queue_is_taken() -> None:
    queued = replace(P0, prefill_tokens_elsewhere=5000)
    given = replace(P0, prefill_tokens_here=5000)
    for busy in (queued, given):
        assert {place([D0], [busy, P1], seed=seed).prefill for seed in range(20)} == {"prefill-1"}


def test_without_a_prefill_rank_the_decode_rank_computes() -> None:
    assert place([D0], [], remote_prefill=RemotePrefill.ALWAYS).prefill is None


def test_ranks_that_cannot_hold_a_request_are_passed_over() -> None:
    small = replace(D0, context_tokens_max=1000)
    assert {place([small, D1], seed=seed).decode for seed in range(20)} == {"decode-1"}
    assert place([replace(D0, context_tokens_max=1001)]).decode == "decode-0"
    with pytest.raises(UnavailableError):
        place([small])
    assert place([D0], [replace(P0, context_tokens_max=999)]).prefill is None


def test_a_rank_that_does_not_offer_the_fidelity_is_passed_over() -> None:
    fast_only = replace(D0, fidelities=(Fidelity.FAST,))
    assert place([fast_only, D1], fidelity=Fidelity.EXACT).decode == "decode-1"
    with pytest.raises(UnavailableError):
        place([fast_only], fidelity=Fidelity.EXACT)


def test_ranks_that_failed_this_request_are_taken_only_if_nobody_else_is_there() -> None:
    assert {place([D0, D1], avoid=("decode-0",), seed=seed).decode for seed in range(20)} == {"decode-1"}
    assert place([D0], avoid=("decode-0",)).decode == "decode-0"
    assert place([D0], [P0, P1], avoid=("prefill-1",)).prefill == "prefill-0"


def test_the_same_seed_and_state_give_the_same_choice() -> None:
    ranks = [candidate(f"decode-{index}") for index in range(8)]
    assert [place(ranks, seed=seed) for seed in range(30)] == [place(ranks, seed=seed) for seed in range(30)]


def test_a_conversation_stays_where_its_state_is_unless_that_rank_is_clearly_busier() -> None:
    def chosen(**busy: int) -> set[str]:
        ranks = [replace(D0, **busy), D1]
        return {place(ranks, hot_rank=RankId("decode-0"), seed=seed).decode for seed in range(20)}

    assert chosen() == chosen(requests_here=1) == {"decode-0"}
    assert chosen(requests_here=2) == {"decode-1"}
    assert place([D1], hot_rank=RankId("decode-0")).decode == "decode-1"


def test_d1_one_prefix_that_all_share_does_not_draw_all_to_one_rank() -> None:
    counts: Counter[str] = Counter()
    hot = "decode-0"
    for seed in range(2000):
        ranks = [candidate(f"decode-{index}", requests_here=counts[f"decode-{index}"]) for index in range(8)]
        hot = place(ranks, prompt_tokens=1100, stored_tokens=1000, hot_rank=RankId(hot), seed=seed).decode
        counts[hot] += 1
    assert max(counts.values()) / (2000 / 8) <= 1.25


def test_choices_of_one_prompt_go_together_while_the_ranks_are_there() -> None:
    went = Placement(RankId("decode-1"), RankId("prefill-1"))
    busy = replace(D1, requests_here=7)
    assert place([D0, busy], [P0, P1], beside=went) == went
    assert place([D0, busy], [P0], beside=went).decode == "decode-0"
    assert place([D0, busy], [P0, P1], beside=went, avoid=("decode-1",)).decode == "decode-0"


@pytest.mark.parametrize(
    ("costs", "queued", "remote"),
    [
        (Costs(0.001, 0.001), 0, True),
        (Costs(0.001, 0.002), 1400, True),
        (Costs(0.001, 0.002), 1600, False),
        (Costs(0.001, 0.002, handoff_s=2.0), 0, False),
        (Costs(0.001, None), 2700, True),
        (Costs(0.001, None), 2800, False),
        (Costs(None, 0.002), 9000, True),
    ],
)
def test_measured_costs_decide_whether_a_prefill_rank_pays(costs: Costs, queued: int, remote: bool) -> None:
    """A row on a decode rank counts 1.25 times, and three of another before it was measured: 1,000 rows there against
    the queue, the rows and the hand-off elsewhere."""
    placement = place([D0], [replace(P0, prefill_tokens_here=queued)], costs=costs)
    assert (placement.prefill is not None) == remote


def test_a_prompt_that_is_computed_locally_goes_where_no_other_is_before_it() -> None:
    queued = replace(D0, prefill_tokens_here=500)
    assert {place([queued, D1], [], seed=seed).decode for seed in range(20)} == {"decode-1"}
    busy = replace(D1, requests_here=3)
    assert {place([queued, busy], [], seed=seed).decode for seed in range(20)} == {"decode-0"}


def test_rows_that_queue_on_a_decode_rank_send_even_short_prompts_to_a_prefill_rank() -> None:
    costs = Costs(0.001, 0.001)
    queued = replace(D0, prefill_tokens_here=2000)
    assert place([D0], [P0], prompt_tokens=40, costs=costs).prefill is None
    assert place([queued], [P0], prompt_tokens=40, costs=costs).prefill == "prefill-0"


def test_round_robin_takes_each_in_turn_and_random_all_of_them() -> None:
    ranks, helpers = [D1, D0], [P1, P0]
    turns = [place(ranks, helpers, policy=Policy.ROUND_ROBIN, turn=turn) for turn in range(4)]
    assert [placement.decode for placement in turns] == ["decode-0", "decode-1"] * 2
    assert [placement.prefill for placement in turns] == ["prefill-0", "prefill-1"] * 2
    drawn = Counter(place(ranks, helpers, policy=Policy.RANDOM, seed=seed).decode for seed in range(200))
    assert min(drawn.values()) > 60
