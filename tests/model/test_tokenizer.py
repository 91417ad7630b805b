"""The shipped tokenizer round-trips everything, and text never turns into special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerFile

from whalepod.core.errors import CheckpointError
from whalepod.model.special_tokens import IMAGE_SPELLING, all_spellings
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.model.tokenizer import Tokenizer
from whalepod.model.tokenizer_training import VOCAB_SIZE, train_tokenizer

TOKENIZER = shipped_tokenizer()
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"


def decoded(ids: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(token_id) for token_id in ids).decode()


def test_the_shipped_vocabulary_is_full_and_its_first_ids_are_the_released_ones() -> None:
    assert TOKENIZER.ids_end == VOCAB_SIZE
    assert [TOKENIZER.token_id(spelling) for spelling in all_spellings()] == list(range(len(all_spellings())))
    assert all_spellings()[:2] == ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    assert TOKENIZER.special_ids == frozenset(range(len(all_spellings())))


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    assert decoded(TOKENIZER.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.text() | st.text(" ") | st.text("─"))
def test_no_text_has_fewer_tokens_than_its_length_allows(text: str) -> None:
    assert TOKENIZER.tokens_at_least(text) <= len(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    "text",
    [
        "🐳 👩‍👩‍👧‍👦 emoji",
        "深度求索 日本語 한국어",
        "café naïve e\u0301",
        "\x00\x1f\u2028",
        "  \n\n\tindent\r\n ",
        "1234567890",
        "",
    ],
)
def test_awkward_text_round_trips(text: str) -> None:
    assert decoded(TOKENIZER.encode(text)) == text
    assert TOKENIZER.file.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("spelling", all_spellings())
def test_a_special_spelling_in_text_is_only_text(spelling: str) -> None:
    ids = TOKENIZER.encode(f"a {spelling} b")
    assert not TOKENIZER.special_ids.intersection(ids)
    assert decoded(ids) == f"a {spelling} b"
    assert TOKENIZER.token_bytes(TOKENIZER.token_id(spelling) or 0) == spelling.encode()


def test_english_takes_clearly_fewer_tokens_than_bytes() -> None:
    text = (
        "In the beginning God created the heaven and the earth. The request goes to the engine, which returns tokens."
    )
    assert len(TOKENIZER.encode(text)) < len(text) / 3


def test_every_id_has_bytes_of_its_own() -> None:
    spelled = [TOKENIZER.token_bytes(token_id) for token_id in range(TOKENIZER.ids_end)]
    assert all(spelled)
    assert {bytes([byte]) for byte in range(256)} <= set(spelled)
    assert TOKENIZER.token_bytes(TOKENIZER.ids_end) == TOKENIZER.token_bytes(-1) == b""


def test_a_tokenizer_with_added_tokens_that_are_not_special_still_keeps_text_plain() -> None:
    values = json.loads(TOKENIZER.json)
    for added in values["added_tokens"]:
        added["special"] = False
    other = Tokenizer(json.dumps(values))
    assert other.special_ids == frozenset()
    assert not {other.token_id("<｜User｜>"), other.token_id("</think>")} & set(other.encode("<｜User｜></think>"))


def test_training_is_repeatable_and_needs_no_text_to_cover_all_bytes() -> None:
    first, second = (train_tokenizer(["to be or not to be"] * 3, vocab_size=512) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.decode(first.encode("鯨").ids) == "鯨"


def test_other_files_have_other_fingerprints() -> None:
    golden = Tokenizer.from_dir(GOLDEN)
    assert golden.fingerprint != TOKENIZER.fingerprint
    assert golden.ids_end == 512
    assert golden.token_id(IMAGE_SPELLING) is None


def test_a_file_that_is_no_byte_level_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        Tokenizer.from_dir(tmp_path)
    for text in ("", "[]", "{}", '{"model": 1}'):
        with pytest.raises(CheckpointError):
            Tokenizer(text)
    values = json.loads(TOKENIZER.json)
    values["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    TokenizerFile.from_str(json.dumps(values))
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer(json.dumps(values))
