"""What a small writer's text must be to enter the corpus, and which of two alike texts does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

WORDS: dict[str, tuple[int, int]] = {"story": (25, 175), "answer": (3, 75)}
"""Least and most words by kind."""
PLAIN = re.compile(r"[A-Za-z0-9 ,.'\"!?;:()\-\n]+")
WHOLE_END = re.compile(r"[.!?][\"')]?$")
WORD = re.compile(r"[A-Za-z']+")
META = re.compile(
    r"\bAI\b|language model|SmolLM|Hugging|\bLLM\b|assistant|as an? (?:artificial|machine)|https?:|www\.|\bprompt\b"
    r"|this story|the story (?:is|of)|in conclusion|\bessay\b|\bsex|\bkill|\bmurder|\bsuicid|\bblood|\bdrunk"
    r"|\bwhore|\bnaked|\brape|\bnigg|\bfuck|\bshit|\bNazi|\bgun\b|\bracis",
    re.IGNORECASE,
)
LIST_LINE = re.compile(r"^\s*(?:\d+[.)]|[-*])", re.MULTILINE)
SENTENCE = re.compile(r"[^.!?]+[.!?]")
PIECE = re.compile(r"[^.!?]+[.!?]+[\"']?\s*")
"""A sentence, or the part of one that a quoted sentence ends."""
TWICE = frozenset({"very", "had", "that", "no", "bye", "ha", "so"})
"""Words that may stand twice in a row."""
PIECES_DROPPED_MAX = 8
DIFFERENT_LEAST = 0.46
"""Different words over words, of texts of 40 words; longer ones are let have less."""
REPEATED_RUN_MAX = 3
SAME_BEGINNINGS_MOST = 0.45
"""Share of sentences that begin with the same two words."""


def fault_of(kind: str, text: str) -> str | None:
    """Why a text is not taken; None if it is."""
    words = [word.lower() for word in WORD.findall(text)]
    least, most = WORDS[kind]
    if not least <= len(words) <= most:
        return "length"
    if not PLAIN.fullmatch(text) or LIST_LINE.search(text):
        return "form"
    if not WHOLE_END.search(text.rstrip()):
        return "end"
    if META.search(text):
        return "meta"
    if text.count('"') % 2:
        return "quotes"
    return _repetition(text, words)


def _repetition(text: str, words: list[str]) -> str | None:
    sentences = [sentence.strip().lower() for sentence in SENTENCE.findall(text)]
    if len(set(sentences)) < len(sentences):
        return "sentence twice"
    different = len(set(words)) / len(words)
    if len(words) >= 20 and different < DIFFERENT_LEAST * (40 / max(40, len(words))) ** 0.35:
        return "few words"
    if any(one == two and one not in TWICE for one, two in pairwise(words)):
        return "word twice"
    grams = Counter(zip(words, words[1:], words[2:], words[3:], strict=False))
    if grams and max(grams.values()) >= REPEATED_RUN_MAX:
        return "run"
    starts = Counter(tuple(sentence.split()[:2]) for sentence in sentences)
    if len(sentences) >= 5 and max(starts.values()) > SAME_BEGINNINGS_MOST * len(sentences):
        return "same beginnings"
    return None


def tidied(text: str) -> str:
    """One blank between words, one line break between paragraphs."""
    text = re.sub(r"[ \t]+", " ", text.strip())
    return re.sub(r" ?\n[\n ]*", "\n", text)


def without_rare_words(texts: Iterable[str], *, least: int) -> Iterator[bool]:
    """For each text whether all its words stand in at least so many of the texts."""
    bags = [frozenset(word.lower() for word in WORD.findall(text)) for text in texts]
    seen: Counter[str] = Counter()
    for bag in bags:
        seen.update(bag)
    for bag in bags:
        yield all(seen[word] >= least for word in bag)


class Novelty:
    """Says of each text whether none like it came before: the same words, or the same beginning of 12 words."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        words = [word.lower() for word in WORD.findall(text)]
        keys = {" ".join(words), "^" + " ".join(words[:12])} if len(words) > 12 else {" ".join(words)}
        if keys & self._seen:
            return False
        self._seen |= keys
        return True


def good_part(kind: str, text: str) -> str:
    """The longest beginning of whole sentences that has no fault; empty if there is none."""
    pieces: list[str] = []
    seen: set[str] = set()
    words = 0
    for piece in PIECE.findall(tidied(text)):
        key = piece.strip().lower()
        own = WORD.findall(key)
        words += len(own)
        if words > WORDS[kind][1] or key in seen or META.search(piece) or not PLAIN.fullmatch(piece):
            break
        if any(one == two and one not in TWICE for one, two in pairwise(own)):
            break
        seen.add(key)
        pieces.append(piece)
    for _ in range(PIECES_DROPPED_MAX):
        if not pieces:
            return ""
        part = "".join(pieces).strip()
        fault = fault_of(kind, part)
        if fault is None:
            return part
        pieces.pop()
    return ""
