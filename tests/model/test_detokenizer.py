"""Text from ids: the same at every split, whole characters only, and nothing of a stop string shown too early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whalepod.model.detokenizer import Detokenizer
from whalepod.model.tiny_checkpoint import shipped_tokenizer

TOKENIZER = shipped_tokenizer()
END_ID = 1


def streamed(ids: Sequence[int], chunks: Sequence[int], **options: object) -> list[str]:
    """The pieces that come out when `ids` arrive in chunks of these lengths, the rest at once."""
    detokenizer = Detokenizer(TOKENIZER, **options)  # pyright: ignore[reportArgumentType]
    pieces: list[str] = []
    rest = list(ids)
    for length in chunks:
        pieces.append(detokenizer.push(rest[:length]))
        rest = rest[length:]
    return [*pieces, detokenizer.push(rest), detokenizer.finish()]


def by_character(text: str, stop: Sequence[str], include: bool) -> str:
    """What stop strings mean: read on until the text ends in one; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return text[:end] if include else text[: end - len(max(found, key=len))]
    return text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.ids_end - 1), max_size=30), st.lists(st.integers(0, 5), max_size=10))
def test_any_ids_read_the_same_at_any_split(ids: list[int], chunks: list[int]) -> None:
    whole = b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids).decode("utf-8", "replace")
    assert "".join(streamed(ids, chunks, skip_special_tokens=False)) == whole


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="ab🐳", max_size=20),
    st.lists(st.text(alphabet="ab🐳", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 3), max_size=12),
    st.booleans(),
)
def test_stop_strings_cut_where_reading_by_character_would(
    text: str, stop: list[str], chunks: list[int], include: bool
) -> None:
    ids = [token_id for character in text for token_id in TOKENIZER.encode(character)]
    pieces = streamed(ids, chunks, stop=stop, include_stop=include)
    assert "".join(pieces) == by_character(text, stop, include)


def test_a_character_appears_only_when_it_is_whole() -> None:
    ids = [TOKENIZER.token_id(character) or 0 for character in "ðŁĲ³"]
    assert [TOKENIZER.token_bytes(token_id) for token_id in ids] == [b"\xf0", b"\x9f", b"\x90", b"\xb3"]
    assert streamed(ids, [1, 1, 1, 1]) == ["", "", "", "🐳", "", ""]


def test_a_character_that_is_never_finished_becomes_a_replacement_character() -> None:
    ids = [*TOKENIZER.encode("ok"), TOKENIZER.token_id("ð") or 0]
    pieces = streamed(ids, [])
    assert pieces == ["ok", "\N{REPLACEMENT CHARACTER}"]


def test_an_ending_that_may_become_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["END"])
    assert detokenizer.push(TOKENIZER.encode("x E")) == "x "
    assert detokenizer.push(TOKENIZER.encode("N")) == ""
    assert detokenizer.push(TOKENIZER.encode("o")) == "ENo"
    assert detokenizer.push(TOKENIZER.encode("E")) == ""
    assert detokenizer.finish() == "E"
    assert detokenizer.stop_matched is None


def test_after_a_match_nothing_more_is_shown() -> None:
    detokenizer = Detokenizer(TOKENIZER, stop=["END", "E"])
    assert detokenizer.push(TOKENIZER.encode("go ENDING")) == "go "
    assert detokenizer.stop_matched == "E"
    assert detokenizer.push(TOKENIZER.encode("more")) == ""
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<｜end▁of▁sentence｜>b")])
def test_special_tokens_are_shown_only_on_demand(skip: bool, text: str) -> None:
    ids = [*TOKENIZER.encode("a"), END_ID, *TOKENIZER.encode("b")]
    assert "".join(streamed(ids, [1, 1], skip_special_tokens=skip)) == text
