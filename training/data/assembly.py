"""From written texts and made-up documents to the documents of one split, in a seeded order.

A text is used once: a story alone, as a chat's answer, or among others in a long document; an answer in a chat of one
to three turns.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .documents import Document, chat, system, user
from .facts import answered_questions, fact_document
from .filters import Novelty, good_part, without_rare_words
from .json_answers import invented_document, json_document
from .prompts import with_article
from .recall import recall_document
from .talk import SYSTEMS, conversation, polite_turn, talk_document
from .tools import tool_document
from .words import ANIMALS, PLACES, THINGS

HELD_OUT_PERMILLE = 10
RARE_LEAST = 4
"""A text with a word that stands in fewer texts is left out."""
RECALL_SHARE, RECALL_SHARE_HELD_OUT, ALONE_SHARE = 0.16, 0.5, 0.4
"""Of the stories: those that go into long documents; and of the rest, those that stand alone."""
TURNS = (1, 1, 1, 2, 2, 3)


@dataclass(frozen=True, slots=True)
class Written:
    """One of SmolLM's texts, with the prompt's group and, for answers, the question."""

    kind: str
    group: str
    ask: str
    text: str


@dataclass(frozen=True, slots=True)
class MadeUp:
    """How many made-up documents to draw for training; a hundredth of that is held out as well."""

    tool: int = 4000
    json: int = 12_000
    talk: int = 14_000
    facts: int = 14_000


def is_held_out(group: str) -> bool:
    """The same in every run. Documents without a group are always for training."""
    return bool(group) and int.from_bytes(hashlib.sha256(group.encode()).digest()[:4], "big") % 1000 < HELD_OUT_PERMILLE


def chosen_texts(rows: Iterable[Mapping[str, str]]) -> list[Written]:
    """The good part of each text that has one, each only once, without rare words."""
    novelty = Novelty()
    chosen: list[Written] = []
    for row in rows:
        if row["ask"] in answered_questions():
            continue
        text = good_part(row["kind"], row["text"])
        if text and novelty.is_new(text):
            chosen.append(Written(row["kind"], row["group"], row["ask"], text))
    common = without_rare_words([one.text for one in chosen], least=RARE_LEAST)
    return [one for one, keep in zip(chosen, common, strict=True) if keep]


def documents(written: Sequence[Written], made_up: MadeUp, *, held_out: bool, seed: int) -> list[Document]:
    """Everything of one split, mixed."""
    draw = random.Random(f"{seed} {held_out}")
    own = [one for one in written if is_held_out(one.group) == held_out]
    draw.shuffle(own)
    stories = [one for one in own if one.kind == "story"]
    answers = [one for one in own if one.kind == "answer"]
    long_texts = int((RECALL_SHARE_HELD_OUT if held_out else RECALL_SHARE) * len(stories))
    found = [
        *_recall_documents(draw, [one.text for one in stories[:long_texts]]),
        *(_story_document(draw, one) for one in stories[long_texts:]),
        *_answer_documents(draw, answers),
        *_made_up(draw, made_up, held_out=held_out),
    ]
    draw.shuffle(found)
    return found


def _made_up(draw: random.Random, made_up: MadeUp, *, held_out: bool) -> Iterator[Document]:
    def any_json(draw: random.Random) -> Document:
        return invented_document(draw) if draw.random() < 0.1 else json_document(draw)

    makers: tuple[tuple[int, Callable[[random.Random], Document]], ...] = (
        (made_up.tool, tool_document),
        (made_up.json, any_json),
        (made_up.talk, talk_document),
        (made_up.facts, fact_document),
    )
    for wanted, maker in makers:
        for _ in range(wanted):  # so many are drawn, and those of this split are kept
            document = maker(draw)
            if is_held_out(document.group) == held_out:
                yield document


def _recall_documents(draw: random.Random, paragraphs: Sequence[str]) -> Iterator[Document]:
    rest = list(paragraphs)
    while len(rest) > 5:
        document, used = recall_document(draw, rest)
        rest = rest[used:]
        yield document


def _answer_documents(draw: random.Random, answers: Sequence[Written]) -> Iterator[Document]:
    rest = list(answers)
    while rest:
        turns = [
            (one.ask, one.text, _thought(draw, one.ask))
            for one in (rest.pop() for _ in range(min(len(rest), draw.choice(TURNS))))
        ]
        if draw.random() < 0.08:
            turns.append(polite_turn(draw, thanks=True))
        if draw.random() < 0.05:
            turns.insert(0, polite_turn(draw))
        yield conversation(draw, turns[0][0], turns)


def _story_document(draw: random.Random, one: Written) -> Document:
    if draw.random() < ALONE_SHARE:
        return Document("story", one.group, text=one.text)
    name, hero, _ = one.group.split("|", 2)
    asked = _asked_story(draw, name, hero, one.text)
    messages = [*([system(draw.choice(SYSTEMS))] if draw.random() < 0.2 else []), user(asked)]
    if draw.random() < 0.12:
        thought = draw.choice(
            (
                f"The user wants a story. It is about {with_article(hero)} named {name}.",
                f"I tell a short story about {name} the {hero}.",
            )
        )
        return chat("chat_thinking", one.group, messages, one.text, reasoning=thought)
    return chat("chat", one.group, messages, one.text)


def _asked_story(draw: random.Random, name: str, hero: str, text: str) -> str:
    """What a user says who gets this story: nothing is named that is not in it."""
    lower = text.lower()
    who = with_article(hero)
    things = [noun for noun in (*THINGS, *ANIMALS) if noun != hero and f" {noun}" in lower]
    places = [noun for noun in PLACES if f"the {noun}" in lower]
    asks = [
        f"Tell me a story about {who}.",
        f"Write a short story about {who}.",
        f"Tell me a story about {who} named {name}.",
        f"Can you tell me a story about {name} the {hero}?",
        f"I want to hear a story about {who}.",
        "Tell me a story.",
    ]
    if things:
        thing = with_article(draw.choice(things))
        asks += [
            f"Tell me a story about {who} and {thing}.",
            f"Write a short story about {who} and {thing}.",
            f"Please tell me a story about {name} and {thing}.",
        ]
    if places:
        place = draw.choice(places)
        asks += [
            f"Tell me a story about {who} in the {place}.",
            f"Write a story for children about {who} in the {place}.",
        ]
    return draw.choice(asks)


def _thought(draw: random.Random, asked: str) -> str:
    return draw.choice(
        (
            "I answer in short and simple sentences.",
            f"The user says: {asked} I keep my answer short and simple.",
            "This is a question about everyday things. I give a simple answer.",
            f"I think about this: {asked}",
        )
    )
