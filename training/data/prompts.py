"""What the small writer is asked for: stories and short answers about everyday things, in endless combinations.

A prompt has two faces: what SmolLM is told (with style wishes and, for stories, the first words of its answer), and `ask`,
what a user would say who gets that answer. The corpus holds the second.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .words import (
    ACTIONS,
    ANIMALS,
    COLOURS,
    EVENTS,
    FEELINGS,
    FOODS,
    JOBS,
    NAMES,
    NATURE,
    OBJECTS,
    PEOPLE,
    PLACES,
    THINGS,
    TRAITS,
)

# How often a question is asked with the first words of its answer given: it keeps the answer at the point.
OPENED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class WriterPrompt:
    """`kind`: story or answer. `group` is the same for prompts that must stay on one side of the held-out split."""

    kind: str
    group: str
    user: str
    opening: str
    ask: str


def writer_prompts(kind: str, seed: int) -> Iterator[WriterPrompt]:
    """Endless; the same seed gives the same prompts."""
    draw = random.Random(f"{kind} {seed}")
    questions = tuple(everyday_questions())
    while True:
        yield story_prompt(draw) if kind == "story" else answer_prompt(draw, *draw.choice(questions))


def with_article(noun: str) -> str:
    """`a` or `an` before a noun that can be counted."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def story_prompt(draw: random.Random) -> WriterPrompt:
    name, trait = draw.choice(NAMES), draw.choice(TRAITS)
    hero, other = draw.choice(ANIMALS if draw.random() < 0.6 else PEOPLE), draw.choice(ANIMALS)
    thing, place, event = draw.choice(THINGS), draw.choice(PLACES), draw.choice(EVENTS)
    who = f"{with_article(trait)} {hero} named {name}"
    plot = draw.choice(
        (
            f"who {event}",
            f"who {event} in the {place}",
            f"and {with_article(thing)}",
            f"who finds {with_article(thing)} in the {place}",
            f"who meets {with_article(other)} at the {place}",
            f"who wants {with_article(thing)}",
            f"and {with_article(other)} who play with {with_article(thing)}",
        )
    )
    wish = draw.choice(("Use five to eight short sentences.", "Use easy words.", "Keep it short."))
    asked = draw.choice(
        (
            f"Tell me a story about {who} {plot}.",
            f"Write a short story about {who} {plot}.",
            f"Can you tell me a story about {with_article(hero)} named {name}?",
            f"Tell me a short story about {with_article(hero)} and {with_article(thing)}.",
            f"I want to hear a story about {with_article(trait)} {hero}.",
            f"Please write a story for children about {with_article(hero)} in the {place}.",
            f"Write a story about {with_article(hero)} {plot}.",
        )
    )
    return WriterPrompt(
        kind="story",
        group=f"{name}|{hero}|{plot}",
        user=f"Write a very short story about {who} {plot}. {wish}",
        opening=_opening(draw, name=name, trait=trait, hero=hero, place=place),
        ask=asked,
    )


def _opening(draw: random.Random, *, name: str, trait: str, hero: str, place: str) -> str:
    who = f"{with_article(trait)} {hero}"
    return draw.choice(
        (
            f"Once upon a time, there was {who} named {name}.",
            f"One day, {who} named {name}",
            f"{name} was {who}.",
            f"There once was {who} named {name}.",
            f"{name} the {hero} was very {trait}.",
            f"One sunny morning, {name} the {hero}",
            f"In the {place}, there lived {who} named {name}.",
            f"{name} the {hero} lived near the {place}.",
            f"It was a cold day. {name} the {hero}",
            f"One night, {name} the {hero}",
            f"Once there was {who}. The {hero}'s name was {name}.",
            f"{name} was {who} who loved",
        )
    )


def answer_prompt(draw: random.Random, question: str, opening: str) -> WriterPrompt:
    opened = opening if draw.random() < OPENED_SHARE else ""
    return WriterPrompt("answer", question, question, opened, question)


# A question and, after the bar, how its answer may begin. {n}: the noun, {a}: with its article, capitals at the start.
_PATTERNS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ANIMALS,
        (
            "What is {a}?|{A} is",
            "What does {a} eat?|{A} eats",
            "Where does {a} live?|{A} lives",
            "What does {a} look like?|{A} has",
            "What sound does {a} make?|{A} makes",
            "Tell me something about {a}.|{A}",
            "Can {a} be a pet?|{A} can",
            "How does {a} move?|{A}",
            "What is a baby {n} called?|A baby {n} is called",
            "Is {a} big or small?|{A} is",
            "What does {a} do all day?|{A}",
            "Write one sentence about {a}.|The {n}",
            "Do you like the {n}?|Yes, I like the {n}.",
        ),
    ),
    (
        FOODS,
        (
            "What is {n}?|{N} is",
            "What does {n} taste like?|{N} tastes",
            "What can I make with {n}?|With {n}, you can make",
            "What color is {n}?|{N} is",
            "Is {n} good for me?|{N} is",
            "Where does {n} come from?|{N} comes from",
            "Do you like {n}?|Yes, I like {n}",
            "What goes well with {n}?|{N} goes well with",
            "Tell me about {n}.|{N} is",
            "How do people eat {n}?|People eat {n}",
        ),
    ),
    (
        NATURE,
        (
            "What is the {n}?|The {n} is",
            "Tell me about the {n}.|The {n} is",
            "Why do people like the {n}?|People like the {n} because",
            "Where can I see the {n}?|You can see the {n}",
            "What does the {n} look like?|The {n} looks",
            "Explain the word {n} to a child.",
            "Write two sentences about the {n}.|The {n}",
            "What can I do when I see the {n}?|When you see the {n}, you can",
        ),
    ),
    (
        OBJECTS,
        (
            "What is {a}?|{A} is",
            "What do people use {a} for?|People use {a}",
            "What is {a} made of?|{A} is made of",
            "Where can I find {a}?|You can find {a}",
            "Tell me about {a}.|{A} is",
            "How do I use {a}?|To use {a}, you",
            "What does {a} look like?|{A} has",
            "Why do people need {a}?|People need {a}",
            "Explain the word {n} to a child.",
        ),
    ),
    (
        JOBS,
        (
            "What does {a} do?|{A}",
            "Where does {a} work?|{A} works",
            "What does {a} need for the work?|{A} needs",
            "How can I become {a}?|To become {a}, you",
            "Why do we need {a}?|We need {a}",
            "Tell me about the work of {a}.|{A}",
            "Is it hard to be {a}?|It is",
        ),
    ),
    (
        ACTIONS,
        (
            "How do I {n}?|First,",
            "How can I {n}?|You can",
            "What do I need to {n}?|You need",
            "Can you teach me how to {n}?|Yes! First,",
            "Give me one tip to {n}.|Try to",
            "Why should I {n}?",
            "Is it hard to {n}?|It is",
            "I want to {n}. What is the first step?|The first step is to",
        ),
    ),
    (
        FEELINGS,
        (
            "I feel {n} today.|I",
            "What does it mean to be {n}?|To be {n} means",
            "My friend is {n}. What can I do?|You can",
            "Why do people feel {n}?|People feel {n}",
            "What can I do when I am {n}?|When you are {n}, you can",
            "Write one sentence about a child who is {n}.",
        ),
    ),
    (
        COLOURS,
        (
            "Name something that is {n}.",
            "What things are {n}?|Many things are {n}.",
            "Why do people like {n}?|People like {n} because",
            "Is {n} a nice color?|Yes, {n} is",
            "What does the color {n} make you think of?|The color {n} makes me think of",
        ),
    ),
    (
        PLACES,
        (
            "What can I do at the {n}?|At the {n}, you can",
            "What is {a}?|{A} is",
            "Tell me about {a}.|{A} is",
            "What can I see at the {n}?|At the {n}, you can see",
            "Who works or lives at {a}?",
            "Why do people go to the {n}?|People go to the {n}",
            "Describe {a} in two sentences.|The {n} is",
        ),
    ),
    (
        THINGS,
        (
            "What can I do with {a}?|With {a}, you can",
            "What is {a}?|{A} is",
            "Give me a game to play with {a}.|You can",
            "My {n} is broken. What can I do?|You can",
            "I lost my {n}. What should I do?|You should",
        ),
    ),
)

_PLAIN_QUESTIONS = (
    "Hello!",
    "Hi, how are you?",
    "Good morning!",
    "Good night!",
    "Thank you very much.",
    "What should I eat for breakfast?",
    "What should I eat for dinner?",
    "What can I do on a rainy day?",
    "What can I do on a sunny day?",
    "Tell me a joke.",
    "Tell me a fun fact.",
    "Why is the sky blue?",
    "Why do we sleep?",
    "Why do we need water?",
    "Why do leaves fall?",
    "What is the weather like in summer?",
    "What is the weather like in winter?",
    "How many days are in a week?",
    "What are the seasons of the year?",
    "What is a friend?",
    "What is a family?",
    "What is a birthday?",
    "What is a holiday?",
    "What is music?",
    "What is a story?",
    "What is a number?",
    "What is love?",
    "What is time?",
    "What is a dream?",
    "What is a word?",
    "I am bored. What can I do?",
    "I cannot sleep.",
    "I had a bad day.",
    "I had a great day!",
    "It is my birthday today!",
    "It is raining outside.",
    "It is very hot today.",
    "I have a new dog.",
    "I have a new friend.",
    "I lost my toy.",
    "What do you do in the morning?",
    "What is a good name for a cat?",
    "What is a good name for a dog?",
    "Can you help me?",
    "What is a good gift for my mother?",
    "What is a good gift for my friend?",
    "What game can we play?",
    "How do plants grow?",
    "How do birds fly?",
    "How do fish breathe?",
    "How does rain form?",
    "How do bees make honey?",
    "Why do we brush our teeth?",
    "Why do we go to school?",
    "Why is it good to read?",
    "Why should I be kind?",
    "Why do cats like to sleep?",
    "Why do dogs wag their tails?",
    "Why is snow white?",
    "Why is the sea salty?",
)


def everyday_questions() -> Iterator[tuple[str, str]]:
    """Every question, each once, in a fixed order; with how its answer may begin."""
    seen: set[str] = set()
    for question in (*_PLAIN_QUESTIONS, *_patterned(), *_comparisons()):
        asked, _, opening = question.partition("|")
        if asked not in seen:
            seen.add(asked)
            yield asked, opening


def _patterned() -> Iterator[str]:
    for nouns, patterns in _PATTERNS:
        for pattern in patterns:
            for noun in nouns:
                counted = with_article(noun)
                yield pattern.format(n=noun, a=counted, N=_capital(noun), A=_capital(counted))


def _comparisons() -> Iterator[str]:
    for what, nouns in (("bigger", ANIMALS), ("faster", ANIMALS), ("heavier", OBJECTS)):
        for one, two in zip(nouns, nouns[7:] + nouns[:7], strict=True):
            yield f"Which is {what}, {with_article(one)} or {with_article(two)}?"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
