"""Streamed text is the text that is not streamed: 200 texts with emoji, CJK, combining marks and stop strings, cut at
every place, in bursts of one to six tokens."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from whalepod.model.detokenizer import Detokenizer
from whalepod.model.tiny_checkpoint import shipped_tokenizer

TOKENIZER = shipped_tokenizer()
BYTE_IDS = {
    TOKENIZER.token_bytes(token): token
    for token in range(TOKENIZER.ids_end)
    if len(TOKENIZER.token_bytes(token)) == 1 and token not in TOKENIZER.special_ids
}
TEXTS = 200
BURSTS = range(1, 7)
PIECES = (
    "whale", " and ", "STOP", "ST", "OP", "\n\n", "own fox", "caf\u00e9", "cafe\u0301", "n\u0303o", "Z\u0335\u0321",
    "🐋", "👩\u200d👩\u200d👧", "🇫🇷", "👍🏽", "鯨", "深度求索", "くじら", "고래", "ह\u093f\u0928\u094d\u0926\u0940",
    "حوت", "\u202eabc", "ß", "½", "𝒲", "\u0000", "</", "}\n",
)  # fmt: skip
STOPS = ("STOP", "own fox", "🐋鯨", "e\u0301", "👧", "\n\n", "深度")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def make_texts() -> list[str]:
    rng, texts = Random(16), dict[str, None]()
    while len(texts) < TEXTS:
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(2, 5)))
        texts[unicodedata.normalize(rng.choice(("NFC", "NFD")), text)] = None
    return list(texts)


def cuts(text: str) -> Iterator[list[int]]:
    """The text as ids that none crosses some place: between any two characters, and between the bytes of each."""
    for split in range(len(text) + 1):
        yield TOKENIZER.encode(text[:split]) + TOKENIZER.encode(text[split:])
    for split, character in enumerate(text):
        if len(character.encode()) > 1:
            yield TOKENIZER.encode(text[:split]) + bytewise(character) + TOKENIZER.encode(text[split + 1 :])
    yield bytewise(text)


def bytewise(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def streamed(ids: Sequence[int], burst: int, stop: Sequence[str]) -> tuple[str, str | None, list[str]]:
    detokenizer, pieces = Detokenizer(TOKENIZER, stop=stop), list[str]()
    for start in range(0, len(ids), burst):
        pieces.append(detokenizer.push(ids[start : start + burst]))
    pieces.append(detokenizer.finish())
    return "".join(pieces), detokenizer.stop_matched, pieces


def what_it_means(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Read on until the text ends in a stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            matched = max(found, key=len)
            return text[: end - len(matched)], matched
    return text, None


def test_the_texts_hold_what_they_are_to_hold() -> None:
    texts = make_texts()
    joined = "".join(texts)
    assert all(piece in joined for piece in ("🐋", "👩\u200d👩\u200d👧", "鯨", "고래", "ह"))
    assert any(unicodedata.combining(character) for character in joined)
    stopped = sum(what_it_means(text, STOPS)[1] is not None for text in texts)
    assert min(stopped, TEXTS - stopped) > TEXTS // 5


@pytest.mark.parametrize("stop", [STOPS, ()], ids=["stop strings", "none"])
def test_e1_every_split_and_burst_gives_the_text_that_is_not_streamed(stop: tuple[str, ...]) -> None:
    for text in make_texts():
        meant, matched = what_it_means(text, stop)
        for ids in cuts(text):
            assert streamed(ids, len(ids), stop)[:2] == (meant, matched)
            for burst in BURSTS:
                whole, stopped_by, pieces = streamed(ids, burst, stop)
                assert (whole, stopped_by) == (meant, matched), (text, burst)
                assert not any(REPLACEMENT in piece for piece in pieces), "a character is shown when it is whole"
