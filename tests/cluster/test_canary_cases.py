"""The canary asks what is likely to go wrong: borders, long prompts, both kinds of sampling, both kinds of hit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whalepod.cluster.canary_cases import Shape, Warmth, border_lengths, plan_cases

SHAPE = Shape(
    block_tokens=64,
    kept_rows=44,
    window=32,
    chunk_tokens=512,
    group_tokens=2,
    context_tokens_max=4096,
    vocabulary=1000,
    never_ids=frozenset({7, 999}),
)


def test_the_same_seed_gives_the_same_cases_and_another_gives_others() -> None:
    assert plan_cases(SHAPE, count=8, warm=False) == plan_cases(SHAPE, count=8, warm=False)
    assert plan_cases(SHAPE, count=8, warm=False) != plan_cases(SHAPE, count=8, warm=False, seed=1)


@pytest.mark.parametrize("count", [4, 64])
def test_at_least_half_the_prompts_are_several_blocks_long(count: int) -> None:
    cases = plan_cases(SHAPE, count=count, warm=False)
    assert len(cases) == count
    assert sum(len(case.prompt_ids) >= 3 * SHAPE.block_tokens for case in cases) * 2 >= count


def test_the_other_half_reaches_every_kind_of_border() -> None:
    lengths = {len(case.prompt_ids) for case in plan_cases(SHAPE, count=128, warm=False)}
    for mark in (SHAPE.block_tokens, SHAPE.kept_rows, SHAPE.window, SHAPE.chunk_tokens):
        assert {mark - 1, mark, mark + 1} <= lengths
    assert len(list(border_lengths(SHAPE))) <= 64


def test_greedy_and_seeded_requests_are_both_there_and_ask_for_log_probabilities() -> None:
    cases = plan_cases(SHAPE, count=16, warm=False)
    assert sum(case.sampling.greedy for case in cases) == 8
    assert all(case.sampling.seed is not None for case in cases if not case.sampling.greedy)
    assert all(case.sampling.logprobs == 0 for case in cases)


def test_ids_that_text_does_not_hold_are_left_out() -> None:
    for case in plan_cases(SHAPE, count=64, warm=True):
        assert not SHAPE.never_ids & {*case.prompt_ids, *case.primer}
        assert min(case.prompt_ids) >= 3


def test_warm_cases_follow_a_conversation_or_share_whole_blocks_below_the_kept_rows() -> None:
    cases = plan_cases(SHAPE, count=32, warm=True)
    turns = [case for case in cases if case.warmth is Warmth.TURN]
    prefixes = [case for case in cases if case.warmth is Warmth.PREFIX]
    assert len(turns) == len(prefixes) == 16
    for case in turns:
        assert case.prompt_ids[: len(case.primer)] == case.primer
        assert len(case.prompt_ids) > len(case.primer)
    for case in prefixes:
        shared = next(
            index for index, pair in enumerate(zip(case.prompt_ids, case.primer, strict=False)) if pair[0] != pair[1]
        )
        assert shared >= SHAPE.block_tokens
        assert len(case.primer) - shared >= SHAPE.kept_rows


def test_cases_fit_a_small_context() -> None:
    small = replace(SHAPE, context_tokens_max=200)
    for case in plan_cases(small, count=64, warm=True) + plan_cases(small, count=64, warm=False):
        assert case.sampling.max_tokens is not None
        assert 1 <= len(case.prompt_ids) <= 200 - case.sampling.max_tokens
