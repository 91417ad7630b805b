"""A request's place: reasoning before the grammar, the answer in it, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.grammar.random_model import answer
from tests.engine.grammar.shipped_vocabulary import EOS_ID, VOCAB_SIZE, compiled, regex, tokenizer
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.masks import allocate, unpack
from whalepod.engine.grammar.spec import GrammarKind
from whalepod.engine.grammar.state import GrammarState

THINK_END = 8


def allowed(state: GrammarState) -> set[int]:
    mask = allocate(1, VOCAB_SIZE)[0]
    state.fill(mask)
    return {int(token_id) for token_id in np.flatnonzero(unpack(mask, VOCAB_SIZE))}


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text)


def test_reasoning_is_free_but_cannot_end_the_sequence() -> None:
    state = GrammarState(regex("ab"), starts_after=THINK_END)
    assert allowed(state) == set(range(VOCAB_SIZE)) - {EOS_ID}
    assert not state.accept(EOS_ID)
    assert all(state.accept(token_id) for token_id in ids_of("anything, even ab"))
    assert not state.started
    assert not state.accepting


def test_e11_the_grammar_governs_from_the_first_token_after_the_marker() -> None:
    state = GrammarState(regex("ab"), starts_after=THINK_END)
    state.replay([*ids_of("hm"), THINK_END])
    assert state.started
    assert allowed(state) == allowed(GrammarState(regex("ab")))
    state.replay([*ids_of("ab"), EOS_ID])
    assert state.ended


def test_a_marker_spelled_in_plain_text_starts_nothing() -> None:
    state = GrammarState(regex("ab"), starts_after=THINK_END)
    state.replay(ids_of("</think>"))
    assert not state.started


def test_tokens_are_taken_back_across_the_marker_and_the_end() -> None:
    tokens = [*ids_of("hm"), THINK_END, *ids_of("a"), *ids_of("b"), EOS_ID]
    for back in range(len(tokens) + 1):
        state, fresh = (GrammarState(regex("ab"), starts_after=THINK_END) for _ in range(2))
        state.replay(tokens)
        state.rollback(back)
        fresh.replay(tokens[: len(tokens) - back])
        assert (state.started, state.ended, state.accepting) == (fresh.started, fresh.ended, fresh.accepting)
        assert state.ended or allowed(state) == allowed(fresh)
        state.replay(tokens[len(tokens) - back :])
        assert state.ended


def test_more_than_was_accepted_cannot_be_taken_back() -> None:
    state = GrammarState(regex("ab"))
    state.replay(ids_of("a"))
    with pytest.raises(AssertionError):
        state.rollback(2)


@pytest.mark.parametrize("seed", range(6))
def test_e13_replaying_the_tokens_leads_to_the_same_place_at_every_point(seed: int) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3}
    grammar = compiled(GrammarKind.JSON_SCHEMA, schema)
    ids = answer(grammar, seed=seed, greedy=False).ids
    walking = GrammarState(grammar)
    for count, token_id in enumerate(ids):
        replayed = GrammarState(grammar)
        replayed.replay(ids[:count])
        assert allowed(replayed) == allowed(walking)
        assert walking.accept(token_id)


def test_tokens_that_no_answer_begins_with_cannot_be_replayed() -> None:
    with pytest.raises(GrammarError, match="do not follow the grammar"):
        GrammarState(regex("ab")).replay(ids_of("ac"))
