"""Held-out text and the questions in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.evaluation.held_out_file import (
    CALL,
    CONFIG,
    RESULT,
    TOKENIZER,
    chat_line,
    every_kind,
    json_line,
    recall_line,
    text_line,
    tool_line,
    words,
    write_held_out,
)
from whalepod.core.errors import ConfigError
from whalepod.engine.evaluation.held_out import HeldOut


def read(directory: Path, *lines: dict[str, object]) -> HeldOut:
    return HeldOut.read(write_held_out(directory, lines), TOKENIZER, CONFIG)


def test_scored_tokens_are_those_of_the_targets_and_their_bytes_leave_special_ones_out(tmp_path: Path) -> None:
    line = text_line("story", 30)
    (document,) = read(tmp_path, line).documents
    assert list(document.places) == list(range(1, len(line["ids"])))
    assert document.text_bytes == len(words(30).encode()), "the end of the sequence is scored, but is no text"
    (half,) = read(tmp_path, {**line, "targets": [[2, 4], [7, 8]]}).documents
    assert list(half.places) == [2, 3, 7]


def test_a_question_about_a_fact_knows_how_far_back_it_was_told(tmp_path: Path) -> None:
    told = ("Tim lives in Rome now.", "Where does Tim live?", "Tim lives in Rome.")
    near, far = read(tmp_path, recall_line(*told, words_behind=10), recall_line(*told, words_behind=300)).questions
    assert (near.distance, far.distance) == (128, 512)
    assert near.answer == "Tim lives in Rome."
    assert not read(tmp_path, recall_line(*told[:2], "He lives in Rome.", words_behind=9)).questions


def test_every_turn_of_a_recall_conversation_is_a_question(tmp_path: Path) -> None:
    first = {"role": "user", "content": "Tim has a cat. Mia has a dog. What does Mia have?"}
    turns = [first, {"role": "assistant", "content": "Mia has a dog."}, {"role": "user", "content": "And Tim?"}]
    one, two = read(tmp_path, chat_line("recall", turns, "Tim has a cat.")).questions
    assert (one.answer, len(one.body["messages"])) == ("Mia has a dog.", 1)
    assert (two.answer, len(two.body["messages"])) == ("Tim has a cat.", 3)


def test_a_tool_conversation_asks_for_its_last_call(tmp_path: Path) -> None:
    first = tool_line()["body"]
    turns = [*first["messages"], {"role": "user", "content": "And now?"}, CALL, RESULT]
    twice = chat_line("tool", turns, "8.", tools=first["tools"])
    (question,) = read(tmp_path, twice).questions
    assert [message["role"] for message in question.body["messages"]] == ["user", "assistant", "tool", "user"]
    assert [call["name"] for call in question.calls] == ["get_age"]


def test_json_is_asked_for_only_where_there_is_a_schema(tmp_path: Path) -> None:
    free = json_line()
    free["body"] = {key: value for key, value in free["body"].items() if key != "response_format"}
    held_out = read(tmp_path, json_line(), free)
    assert (len(held_out.documents), len(held_out.of_kind("json"))) == (2, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [0, 1 << 20]}, "line 2: ValueError ids must be tokens of this model"),
        ({"targets": [[0, 3]]}, "line 2: ValueError targets must be runs"),
        ({"targets": [[1, 999]]}, "line 2: ValueError targets must be runs"),
        ({"kind": None, "targets": None}, "line 2: TypeError"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text_line("story", 9), {**text_line("story", 9), **change})


def test_a_file_that_is_no_such_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        HeldOut.read(tmp_path / "none", TOKENIZER, CONFIG)
    (tmp_path / "plain").write_text("{}")
    with pytest.raises(ConfigError, match="not compressed by xz"):
        HeldOut.read(tmp_path / "plain", TOKENIZER, CONFIG)


def test_the_name_of_the_text_follows_from_its_bytes(tmp_path: Path) -> None:
    one, other = read(tmp_path, *every_kind()).sha256, read(tmp_path, *every_kind()[:-1]).sha256
    assert one != other
    assert len(one) == 64
