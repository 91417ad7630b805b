"""Bad values are errors that name the field and the allowed range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from whalepod.core.errors import InvalidFieldError
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "in [0, 1000]"),
        ("temperature", float("nan"), "in [0, 1000]"),
        ("temperature", 1e39, "in [0, 1000]"),
        ("top_p", 0.0, "in (0, 1]"),
        ("top_p", 1.1, "in (0, 1]"),
        ("top_k", -2, "-1 (off) or in [0, 2^31)"),
        ("top_k", 2**31, "-1 (off) or in [0, 2^31)"),
        ("min_p", -0.1, "in [0, 1]"),
        ("min_p", 1.1, "in [0, 1]"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("seed", 2**63, "a signed 64-bit integer"),
        ("logprobs", 21, "in [0, 20]"),
        ("prompt_logprobs", -1, "in [0, 20]"),
        ("presence_penalty", 2.1, "in [-2, 2]"),
        ("frequency_penalty", -2.1, "in [-2, 2]"),
        ("repetition_penalty", 1e-40, "in [0.01, 100]"),
        ("repetition_penalty", 1e39, "in [0.01, 100]"),
        ("n", 0, "in [1, 128]"),
        ("n", 129, "in [1, 128]"),
        ("stop", ("a", ""), "not empty"),
        ("logit_bias", {3: 101.0}, "values in [-100, 100]"),
        ("logit_bias", {-1: 1.0}, "token ids of at least 0"),
        ("allowed_token_ids", (), "1 to 16384 token ids, not 0"),
        ("allowed_token_ids", range(16385), "1 to 16384 token ids, not 16385"),
        ("allowed_token_ids", (3, -1), "token ids of at least 0, not -1"),
        ("bad_words", ("a", ""), "texts of 1 to 256 characters"),
        ("bad_words", ("a" * 257,), "texts of 1 to 256 characters"),
        ("bad_words", ("a",) * 65, "at most 64 texts, not 65"),
        ("bad_word_ids", ((3,), ()), "words of 1 to 64 token ids"),
        ("bad_word_ids", ((3, -1),), "words of 1 to 64 token ids of at least 0"),
        ("bad_word_ids", (range(65),), "words of 1 to 64 token ids"),
        ("bad_word_ids", ((1,),) * 257, "at most 256 words"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_name_and_range(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert allowed in str(caught.value)


def test_the_offline_spelling_of_a_seed_is_a_seed() -> None:
    params = SamplingParams(seq_seed=7)
    assert params.seed == 7
    assert replace(params, top_k=3).seed == 7
    assert SamplingParams(seed=7, seq_seed=7) == params
    with pytest.raises(InvalidFieldError, match=r"seq_seed must be seed \(8\), not 7"):
        SamplingParams(seed=8, seq_seed=7)


def test_one_stop_string_is_a_list_of_one_and_lists_are_taken_as_they_come() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3])  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3,))


def test_one_bad_word_is_a_list_of_one_and_ids_are_taken_as_they_come() -> None:
    params = SamplingParams(bad_words="ab", bad_word_ids=[[3, 4]], allowed_token_ids=[5, 6])  # type: ignore[arg-type]
    assert (params.bad_words, params.bad_word_ids, params.allowed_token_ids) == (("ab",), ((3, 4),), (5, 6))
    assert hash(params) == hash(replace(params))


def test_so_args_are_a_grammar_and_stay_one_when_something_else_changes() -> None:
    params = SamplingParams(so_args={"schema_type": "regex", "schema": "a+"})
    assert params.grammar == GrammarSpec(GrammarKind.REGEX, "a+")
    assert replace(params, temperature=0.5).grammar == params.grammar


def test_bad_so_args_are_refused_at_once() -> None:
    with pytest.raises(InvalidFieldError, match="so_args: schema_type must be one of") as caught:
        SamplingParams(so_args={"schema_type": "yaml", "schema": "a"})
    assert caught.value.field == "so_args"


def test_a_grammar_and_ignore_eos_contradict_each_other() -> None:
    with pytest.raises(InvalidFieldError, match="grammar") as caught:
        SamplingParams(ignore_eos=True, grammar=GrammarSpec(GrammarKind.JSON_OBJECT))
    assert caught.value.field == "ignore_eos"
