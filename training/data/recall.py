"""Long documents in which facts are told among stories, and asked for at the end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

from .documents import Document, assistant, chat, user
from .words import ANIMALS, CITIES, COLOURS, FOODS, NAMES, OBJECTS, PLACES, THINGS

CHARS_LEAST, CHARS_MOST = 1800, 15_000
"""About 500 to 4,000 tokens; short ones are more frequent."""

Fact = tuple[str, str, str, str]
"""What is told, what is asked, what is answered, the answer's own words."""


def _code(draw: random.Random) -> Fact:
    box, number = (
        f"{draw.choice(COLOURS)} {draw.choice(('box', 'door', 'safe', 'bag', 'chest'))}",
        draw.randint(100, 999),
    )
    return (
        f"Remember: the code of the {box} is {number}.",
        f"What is the code of the {box}?",
        f"The code of the {box} is {number}.",
        str(number),
    )


def _word(draw: random.Random) -> Fact:
    name, word = draw.choice(NAMES), draw.choice(OBJECTS)
    return (
        f"The secret word of {name} is {word}.",
        f"What is the secret word of {name}?",
        f"The secret word of {name} is {word}.",
        word,
    )


def _hidden(draw: random.Random) -> Fact:
    name, thing, place = draw.choice(NAMES), draw.choice(THINGS), draw.choice(PLACES)
    return (
        f"{name} hid the {thing} in the {place}.",
        f"Where did {name} hide the {thing}?",
        f"{name} hid the {thing} in the {place}.",
        place,
    )


def _lives(draw: random.Random) -> Fact:
    name, city = draw.choice(NAMES), draw.choice(CITIES)
    return f"{name} lives in {city} now.", f"In which city does {name} live?", f"{name} lives in {city}.", city


def _pet(draw: random.Random) -> Fact:
    owner, animal, name = draw.choice(NAMES), draw.choice(ANIMALS), draw.choice(NAMES)
    return (
        f"The {animal} of {owner} is called {name}.",
        f"What is the {animal} of {owner} called?",
        f"The {animal} of {owner} is called {name}.",
        name,
    )


def _likes(draw: random.Random) -> Fact:
    name, food = draw.choice(NAMES), draw.choice(FOODS)
    return (
        f"The favorite food of {name} is {food}.",
        f"What is the favorite food of {name}?",
        f"The favorite food of {name} is {food}.",
        food,
    )


_FACTS: tuple[Callable[[random.Random], Fact], ...] = (_code, _code, _word, _word, _hidden, _lives, _pet, _likes)


def recall_document(draw: random.Random, paragraphs: Sequence[str]) -> tuple[Document, int]:
    """Facts at random places among `paragraphs`, of which as many are taken as the drawn length asks for; and how many.

    A chat asks two to five of them, one a turn; a plain text has them as questions and answers at its end.
    """
    wanted = math.exp(draw.uniform(math.log(CHARS_LEAST), math.log(CHARS_MOST)))
    taken: list[str] = []
    for paragraph in paragraphs:
        taken.append(paragraph)
        wanted -= len(paragraph)
        if wanted < 0:
            break
    used = len(taken)
    facts = _distinct_facts(draw, draw.randint(3, 8))
    for told, *_ in facts:
        taken.insert(draw.randint(0, len(taken)), told)
    asked = draw.sample(facts, draw.randint(2, min(5, len(facts))))
    text = "\n".join(taken)
    if draw.random() < 0.4:
        questions = "\n".join(f"Question: {question}\nAnswer: {answer}" for _, question, answer, _ in asked)
        return Document("recall", "", text=f"{text}\n{questions}"), used
    lead = draw.choice(("Read this text.", "Here is a text. Read it with care.", "Remember what this text says."))
    messages = [user(f"{lead}\n{text}\n{asked[0][1]}")]
    for (_, _, answer, _), (_, question, _, _) in pairwise(asked):
        messages += [assistant(answer), user(question)]
    return chat("recall", "", messages, asked[-1][2]), used


def _distinct_facts(draw: random.Random, count: int) -> list[Fact]:
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = draw.choice(_FACTS)(draw)
        facts.setdefault(fact[1], fact)
    return list(facts.values())
