"""A body read in pieces is the body an ordinary parser reads, and what is wrong with it is left to that parser."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.services.router.http_body import parse_large_object
from whalepod.services.router.packed_ids import PIECE_BYTES, put_ids, with_packed_ids

IDS = list(range(0, 200_000, 7))


def plain(value: dict[str, Any]) -> dict[str, Any]:
    return {name: list(item) if isinstance(item, array) else item for name, item in value.items()}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": IDS},
        {"model": "whale", "prompt": IDS, "stop": ["]", '"prompt": [1, 2]', "\\"], "n": 2},
        {"prompt": [0]},
        {"prompt": [2**32 - 1, 0]},
        {"user": "x" * 100_000, "prompt": IDS[:10]},
    ],
)
def test_ids_come_packed_and_the_rest_as_it_was(body: dict[str, Any], indent: int | None) -> None:
    read = parse_large_object(json.dumps(body, indent=indent).encode())
    assert isinstance(read["prompt"], array)
    assert plain(read) == body


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["a", "b"]},
        {"prompt": []},
        {"prompt": [1, 2.5]},
        {"prompt": [1, True]},
        {"prompt": [2**32]},
        {"prompt": [-1]},
        {"prompt": [1, [2]]},
        {"prompt": "a", "metadata": {"prompt": [1, 2]}},
        {"messages": [{"role": "user", "content": 'say "prompt": [1, 2] and [3]'}]},
        {'\\"prompt': [1, 2]},
    ],
)
def test_anything_else_is_read_as_ever(body: dict[str, Any]) -> None:
    assert parse_large_object(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    "text",
    [
        b'{"prompt": [1,,2]}',
        b'{"prompt": [1,2,]}',
        b'{"prompt": [1 2]}',
        b'{"prompt": [01]}',
        b'{"prompt": [1,2}',
        b"[1]",
    ],
)
def test_what_is_no_json_object_is_refused_in_the_ordinary_words(text: bytes) -> None:
    with pytest.raises(Exception, match="JSON"):
        parse_large_object(text)


def test_the_last_of_two_prompts_counts() -> None:
    assert plain(parse_large_object(b'{"prompt": [1,2], "prompt": [3]}')) == {"prompt": [3]}
    assert parse_large_object(b'{"prompt": [1,2], "prompt": "x"}') == {"prompt": "x"}


def test_no_piece_is_long() -> None:
    """A trailing comma just where a piece ends is no better than anywhere else."""
    for length in range(PIECE_BYTES // 2 - 3, PIECE_BYTES // 2 + 4):
        text = json.dumps({"prompt": [1] * length}, separators=(",", ":")).encode()
        assert plain(parse_large_object(text)) == {"prompt": [1] * length}
        assert with_packed_ids(text.replace(b"]", b",]")) is None


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "a", '"prompt"', "prompt\\"]),
        st.recursive(
            st.text('":[]{}\\,1prompt ', max_size=30) | st.integers(0, 9) | st.lists(st.integers(0, 99), min_size=1),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("prompt"), inner),
            max_leaves=5,
        ),
    )
)
def test_no_body_is_read_differently(body: dict[str, Any]) -> None:
    assert plain(parse_large_object(json.dumps(body, ensure_ascii=False).encode())) == body


def test_a_mark_that_is_not_where_it_should_be_is_noticed() -> None:
    assert put_ids({"metadata": {"prompt": "mark"}}, "mark", array("I", [1])) is None
