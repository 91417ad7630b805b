"""One place in a grammar: what may follow, the end, and taking back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.grammar.random_model import answer
from tests.engine.grammar.shipped_vocabulary import EOS_ID, VOCAB_SIZE, compiled, regex, tokenizer
from whalepod.engine.grammar.errors import DeadEndError, GrammarError
from whalepod.engine.grammar.masks import allocate, unpack
from whalepod.engine.grammar.matcher import Matcher
from whalepod.engine.grammar.spec import GrammarKind


def followers(matcher: Matcher) -> set[int]:
    mask = allocate(1, VOCAB_SIZE)[0]
    matcher.fill(mask)
    return {int(token_id) for token_id in np.flatnonzero(unpack(mask, VOCAB_SIZE))}


def texts(matcher: Matcher) -> set[bytes]:
    return {tokenizer().token_bytes(token_id) for token_id in followers(matcher) - {EOS_ID}}


def test_only_the_end_may_follow_a_whole_sentence_that_nothing_continues() -> None:
    matcher = regex("a{2}").matcher()
    assert matcher.accept_all(tokenizer().encode("aa"))
    assert (followers(matcher), matcher.accepting, matcher.ended) == ({EOS_ID}, True, False)
    assert matcher.accept(EOS_ID)
    assert matcher.ended
    assert not matcher.accept(EOS_ID)


def test_the_end_may_follow_exactly_where_the_sentence_is_whole() -> None:
    matcher = regex("(ab)*").matcher()
    for character, whole in [("", True), ("a", False), ("b", True)]:
        matcher.accept_all(tokenizer().encode(character))
        assert (EOS_ID in followers(matcher)) is whole
        assert matcher.accepting is whole
    assert matcher.accept(EOS_ID)


def test_the_end_is_refused_inside_a_sentence_and_the_place_stays() -> None:
    matcher = regex("abc").matcher()
    before = followers(matcher)
    assert not matcher.accept(EOS_ID)
    assert followers(matcher) == before


def test_a_token_that_may_not_follow_moves_nothing() -> None:
    matcher = regex("[ab]c").matcher()
    before = followers(matcher)
    for token_id in (tokenizer().encode("x")[0], 5, VOCAB_SIZE - 1, VOCAB_SIZE, -1):
        assert not matcher.accept(token_id)
    assert followers(matcher) == before


def test_no_text_produces_special_tokens_ids_without_text_or_bytes_outside_utf8() -> None:
    matcher = regex("(?s).{0,20}").matcher()
    allowed = followers(matcher)
    assert not allowed & (tokenizer().special_ids - {EOS_ID})
    assert max(allowed) < tokenizer().ids_end
    assert not any(byte >= 0xF5 for token in texts(matcher) for byte in token)


@pytest.mark.parametrize(
    "source", ['start: <[7]> "a"', "start: <[6149]>", 'start: "a" <[1]> "b"', "start: <[8]> | <[10-19]>"]
)
def test_a_grammar_that_names_special_tokens_by_id_cannot_have_them(source: str) -> None:
    matcher = compiled(GrammarKind.EBNF, source).matcher()
    with pytest.raises(DeadEndError):
        walk_without_special_tokens(matcher)


def walk_without_special_tokens(matcher: Matcher) -> None:
    while not matcher.ended:
        allowed = followers(matcher)
        assert not allowed & tokenizer().special_ids
        assert matcher.accept(min(allowed))


def test_spelling_a_special_token_in_plain_text_is_plain_text() -> None:
    matcher = regex("</think>").matcher()
    ids = tokenizer().encode("</think>")
    assert matcher.accept_all(ids) == len(ids) > 1
    assert not regex("</think>").matcher().accept(8)


@pytest.mark.parametrize("pattern", ["a[^\\s\\S]", "[^\\s\\S]", "(?:x|yz)[^\\s\\S]b"])
def test_where_nothing_can_follow_an_error_says_so(pattern: str) -> None:
    with pytest.raises(DeadEndError, match="no token can follow"):
        followers(regex(pattern).matcher())


def test_taking_tokens_back_is_as_if_they_had_never_been() -> None:
    grammar = compiled(GrammarKind.JSON_SCHEMA, {"type": "object", "properties": {"a": {"type": "integer"}}})
    said = answer(grammar, seed=3, greedy=False, max_tokens=60)
    ids = [*said.ids, *([EOS_ID] if said.stopped else [])]
    places = [grammar.matcher()]
    for token_id in ids:
        places.append(places[-1].fork())
        assert places[-1].accept(token_id)
    for count in range(len(ids) + 1):
        matcher = places[-1].fork()
        matcher.rollback(count)
        kept = places[len(ids) - count]
        assert (matcher.ended, matcher.accepting) == (kept.ended, kept.accepting)
        if not matcher.ended:
            assert followers(matcher) == followers(kept)
        assert matcher.accept_all(ids[len(ids) - count :]) == count


def test_the_end_is_one_of_the_tokens_taken_back() -> None:
    matcher = regex("ab?").matcher()
    assert matcher.accept_all([*tokenizer().encode("a"), EOS_ID]) == 2
    matcher.rollback(1)
    assert (matcher.ended, matcher.accepting, EOS_ID in followers(matcher)) == (False, True, True)
    matcher.rollback(1)
    assert not matcher.accepting


def test_requests_that_follow_the_same_grammar_do_not_meet() -> None:
    grammar = regex("a{1,9}|b{1,9}")
    first, second = grammar.matcher(), grammar.matcher()
    first.accept_all(tokenizer().encode("aaa"))
    assert b"b" not in texts(first)
    assert b"b" in texts(second)


def test_a_grammar_that_becomes_too_slow_or_too_large_ends_with_an_error() -> None:
    matcher = compiled(GrammarKind.EBNF, 'start: e\ne: e e | e e e | "a" | ""').matcher()
    letter = tokenizer().encode("a")[0]
    with pytest.raises(GrammarError, match=r"too long|items"):
        repeat(matcher, letter, 2000)


def repeat(matcher: Matcher, token_id: int, count: int) -> None:
    for _ in range(count):
        followers(matcher)
        assert matcher.accept(token_id)
