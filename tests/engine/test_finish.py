"""Finish reasons."""

from __future__ import annotations

from whalepod.engine.finish import Finish, FinishRule
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import FinishReason
from whalepod.engine.sampling_params import SamplingParams

EOS = 1


def _check(params: SamplingParams, token: int, *, output: int, prompt: int = 10, context: int = 100) -> Finish | None:
    rule = FinishRule(params=params, prompt_tokens=prompt, context_tokens_max=context, eos_id=EOS)
    return rule.check(token, output_tokens=output)


STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)


def test_eos_stops() -> None:
    assert _check(SamplingParams(), EOS, output=1) == STOP
    assert _check(SamplingParams(), 7, output=1) is None


def test_eos_does_not_stop_if_ignored_or_too_early() -> None:
    assert _check(SamplingParams(ignore_eos=True), EOS, output=1) is None
    assert _check(SamplingParams(min_tokens=2), EOS, output=1) is None
    assert _check(SamplingParams(min_tokens=2), EOS, output=2) == STOP


def test_a_stop_id_is_named() -> None:
    params = SamplingParams(stop_token_ids=(7,), ignore_eos=True, min_tokens=2)
    assert _check(params, 7, output=2) == Finish(FinishReason.STOP, matched_stop_id=7)
    assert _check(params, 7, output=1) is None


def test_exactly_max_tokens_come_out() -> None:
    params = SamplingParams(max_tokens=3)
    assert [_check(params, 7, output=count) for count in (1, 2, 3)] == [None, None, LENGTH]


def test_a_stop_wins_over_a_length_that_comes_with_it() -> None:
    assert _check(SamplingParams(max_tokens=3), EOS, output=3) == STOP


def test_the_context_ends_a_request_too() -> None:
    assert _check(SamplingParams(), 7, output=89) is None
    assert _check(SamplingParams(), 7, output=90) == LENGTH
    assert _check(SamplingParams(max_tokens=500), 7, output=90) == LENGTH


def test_the_end_of_a_grammar_stops_even_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=5, grammar=GrammarSpec(GrammarKind.REGEX, "a"), stop_token_ids=(7,))
    assert _check(params, EOS, output=2) == STOP
    assert _check(params, 7, output=2) is None


def test_tokens_pass_together_only_where_each_would_alone() -> None:
    for params in (
        SamplingParams(max_tokens=6),
        SamplingParams(stop_token_ids=(7,), ignore_eos=True, min_tokens=3, max_tokens=6),
    ):
        rule = FinishRule(params=params, prompt_tokens=10, context_tokens_max=100, eos_id=EOS)
        passed = 0
        for before in range(6):
            for ids in ((5,), (5, 6, 8), (5, EOS), (7, 5), (5, 6, 8, 9, 5, 6)):
                ends = [rule.check(token, output_tokens=before + count) for count, token in enumerate(ids, 1)]
                if rule.passes(ids, tokens=10 + before):
                    passed += 1
                    assert ends == [None] * len(ids)
        assert passed > 4
