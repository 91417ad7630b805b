"""Whatever a random model says under a grammar is what the grammar's own judges call valid: `jsonschema`, and `re`."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import jsonschema
import pytest

from tests.engine.grammar.random_model import Answer, answer
from tests.engine.grammar.regexes import REGEXES
from tests.engine.grammar.schemas import SCHEMAS_TOTAL, Schema, schemas
from tests.engine.grammar.shipped_vocabulary import compiled, tokenizer
from whalepod.engine.grammar.matcher import CompiledGrammar
from whalepod.engine.grammar.spec import GrammarKind
from whalepod.engine.grammar.state import GrammarState

SCHEMAS = schemas()
QUICK = 5
"""The default run takes one grammar in so many."""
CUT_TOKENS = 4
STOPPED_SHARE_MIN = 0.9


def test_there_are_as_many_grammars_as_promised() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) == SCHEMAS_TOTAL == 200
    assert len(set(REGEXES)) == 50


def _slow_but_one_in(count: int) -> list[Any]:
    return [index if index % QUICK == 0 else pytest.param(index, marks=pytest.mark.slow) for index in range(count)]


@pytest.mark.parametrize("index", _slow_but_one_in(len(SCHEMAS)))
def test_answers_under_a_schema_are_valid_or_cut(index: int) -> None:
    _check_answers(compiled(GrammarKind.JSON_SCHEMA, SCHEMAS[index]), index, SCHEMAS[index])


@pytest.mark.parametrize("index", _slow_but_one_in(len(REGEXES)))
def test_answers_under_a_regular_expression_match_or_are_cut(index: int) -> None:
    _check_answers(compiled(GrammarKind.REGEX, REGEXES[index]), index, REGEXES[index])


def test_the_judges_find_an_answer_that_is_wrong() -> None:
    """A negative control: without its mask the same model says nothing valid."""
    free = answer(compiled(GrammarKind.REGEX, "(?s).{0,40}"), seed=1, greedy=True)
    for judged in (SCHEMAS[3], "abc|abd|xyz"):
        with pytest.raises(AssertionError):
            _judge(judged, free.text(tokenizer()))


@pytest.mark.slow
def test_nine_answers_of_ten_come_to_their_end() -> None:
    grammars = [compiled(GrammarKind.JSON_SCHEMA, schema) for schema in SCHEMAS]
    grammars += [compiled(GrammarKind.REGEX, pattern) for pattern in REGEXES]
    ends = [
        answer(grammar, seed=1000 + index, greedy=greedy).stopped
        for index, grammar in enumerate(grammars)
        for greedy in (True, False)
    ]
    assert sum(ends) >= STOPPED_SHARE_MIN * len(ends)


def _check_answers(grammar: CompiledGrammar, seed: int, judged: Schema | str) -> None:
    for greedy in (True, False):
        said = answer(grammar, seed=seed, greedy=greedy)
        if said.stopped:
            _judge(judged, said.text(tokenizer()))
        cut = answer(grammar, seed=seed, greedy=greedy, max_tokens=CUT_TOKENS)
        assert cut.ids == said.ids[:CUT_TOKENS]
        _judge_completion(grammar, cut, seed, judged)


def _judge_completion(grammar: CompiledGrammar, cut: Answer, seed: int, judged: Schema | str) -> None:
    """What was cut is the beginning of something valid: another model can bring it to its end."""
    state = GrammarState(grammar)
    state.replay(cut.ids)
    rest = answer(grammar, seed=seed + 500_000, greedy=False, begun=state)
    if rest.stopped:
        _judge(judged, Answer(True, [*cut.ids, *rest.ids], state).text(tokenizer()))


def _judge(judged: Schema | str, text: str) -> None:
    if isinstance(judged, str):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # sets of `&&` and the like, which are meant as they are read
            assert re.fullmatch(judged, text), f"{judged!r} does not match {text!r}"
        return
    checker = jsonschema.Draft202012Validator(judged, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        checker.validate(json.loads(text))
    except (jsonschema.ValidationError, json.JSONDecodeError) as error:
        raise AssertionError(f"{text!r}: {error}") from error
