"""Made-up talk: who the model is and what it cannot do, small sums, counting, order, opposites, and words of politeness."""

from __future__ import annotations

import random
from collections.abc import Callable

from .documents import Document, assistant, chat, system, user
from .words import ANIMALS, COLOURS, FOODS, NAMES, OBJECTS, PLACES

SYSTEMS = (
    "You are a helpful assistant.",
    "You are Whalepod-tiny, a small test model.",
    "You are a friendly assistant. You answer in short and simple sentences.",
    "Be kind and use easy words.",
    "You are a kind teacher for small children.",
    "Answer in one or two sentences.",
    "You are a helpful assistant who speaks simple English.",
)

_SELF: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "Who are you?", "What are you?", "What is your name?", "Can you tell me who you are?", "Tell me about yourself.",
            "Hi! Who am I talking to?", "Are you a person?", "Are you a human?", "Introduce yourself.", "What model are you?",
        ),
        (
            "I am Whalepod-tiny, a small test model. I can tell short stories and answer simple questions.",
            "My name is Whalepod-tiny. I am a very small language model that was made to test Whalepod.",
            "I am Whalepod-tiny, a small language model. I am no person, but I like to tell little stories.",
        ),
    ),
    (
        (
            "What can you do?", "How can you help me?", "What are you good at?", "What can I ask you?", "Can you help me?",
            "What do you know?",
        ),
        (
            "I can tell short stories, answer simple questions, call tools and write JSON.",
            "You can ask me for a short story or a simple answer. I can also call tools and write JSON.",
            "I can tell you a little story or talk about everyday things like animals, food and the weather.",
        ),
    ),
    (
        (
            "What can't you do?", "What are your limits?", "Can I trust your answers?", "Are your answers right?",
            "Do you know everything?", "Can you make mistakes?", "Are you smart?",
        ),
        (
            "I am very small, so I know few facts and often make mistakes. Please do not rely on my answers.",
            "I make many mistakes because I am only a small test model. Please check what I say.",
            "I do not know much about the world. I was made to test a server, not to give advice.",
        ),
    ),
    (
        ("Who made you?", "Where do you come from?", "How were you made?", "Who trained you?", "How did you learn to talk?"),
        (
            "I was trained for Whalepod from simple texts that another small model wrote.",
            "I come from the Whalepod project. I learned from simple stories and short dialogues.",
        ),
    ),
    (
        (
            "Can you write a program?", "Write some Python code.", "Can you solve hard math?", "What happened in the news today?",
            "Who is the president?", "Can you see pictures?", "Give me medical advice.", "What is the capital of a far country?",
            "Can you translate a book?",
        ),
        (
            "I am sorry, I am too small for that. I can tell you a short story instead.",
            "I cannot do that. I am a small test model and only know simple things.",
            "Sorry, that is too hard for me. You can ask me about simple everyday things.",
        ),
    ),
)  # fmt: skip

_POLITE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hi!", "Hi there!", "Hello", "Hi", "Hey!", "Good morning!", "Good evening!", "Hello, how are you?"),
        (
            "Hello! How can I help you today?", "Hi! It is nice to meet you. What would you like to talk about?",
            "Hello! Would you like to hear a story?", "Hi there! I am happy to talk with you.",
        ),
    ),
    (
        ("Thank you!", "Thanks!", "Thank you very much.", "Thanks, that was nice.", "That was a nice story. Thank you!"),
        ("You are welcome!", "You are welcome! I am glad that you liked it.", "It was a pleasure. Do you want to hear more?"),
    ),
    (
        ("Bye!", "Goodbye!", "See you later.", "Good night!", "I have to go now."),
        ("Goodbye! Have a nice day.", "Bye! Come back soon.", "Good night! Sleep well."),
    ),
)  # fmt: skip

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_OPPOSITES = (
    "big small,hot cold,up down,day night,happy sad,fast slow,open closed,wet dry,light dark,old new,young old,loud quiet,"
    "hard soft,long short,full empty,clean dirty,strong weak,good bad,left right,early late,rich poor,high low,near far"
)


def talk_document(draw: random.Random) -> Document:
    """One to three turns, with or without a system message, with or without thinking.

    Single turns of which there are few, such as questions about the model, are always for training.
    """
    kinds = [draw.choice(_TURNS) for _ in range(draw.choice((1, 1, 1, 2, 2, 3)))]
    turns = [kind(draw) for kind in kinds]
    few = len(turns) == 1 and kinds[0] in _FEW
    return conversation(draw, "" if few else "talk|" + "|".join(asked for asked, *_ in turns), turns)


def conversation(draw: random.Random, group: str, turns: list[tuple[str, str, str]]) -> Document:
    """A chat of (question, answer, reasoning); one in six thinks before the last answer."""
    messages = [system(draw.choice(SYSTEMS))] if draw.random() < 0.3 else []
    for asked, answer, _ in turns[:-1]:
        messages += [user(asked), assistant(answer)]
    asked, answer, reasoning = turns[-1]
    messages.append(user(asked))
    if draw.random() < 1 / 6:
        return chat("chat_thinking", group, messages, answer, reasoning=reasoning)
    return chat("chat", group, messages, answer)


def polite_turn(draw: random.Random, *, thanks: bool = False) -> tuple[str, str, str]:
    asked, answers = _POLITE[1] if thanks else draw.choice(_POLITE)
    return draw.choice(asked), draw.choice(answers), "The user is polite. I answer in a friendly way."


def _self_turn(draw: random.Random) -> tuple[str, str, str]:
    asked, answers = draw.choice(_SELF)
    return draw.choice(asked), draw.choice(answers), "The user asks about me. I am Whalepod-tiny, a small test model."


def _sum_turn(draw: random.Random) -> tuple[str, str, str]:
    one, two = draw.randint(0, 20), draw.randint(0, 20)
    if draw.random() < 0.5:
        asked = draw.choice(
            ("What is {} + {}?", "How much is {} plus {}?", "Add {} and {}.", "{} + {} = ?", "What is {} plus {}?")
        )
        total = one + two
        reasoning = f"I add {one} and {two}. {one} + {two} = {total}."
        answer = draw.choice((f"{one} + {two} = {total}.", f"{one} plus {two} is {total}.", f"The answer is {total}."))
        return asked.format(one, two), answer, reasoning
    one, two = max(one, two), min(one, two)
    asked = draw.choice(("What is {} - {}?", "How much is {} minus {}?", "{} - {} = ?", "What is {} minus {}?"))
    rest = one - two
    answer = draw.choice((f"{one} - {two} = {rest}.", f"{one} minus {two} is {rest}.", f"The answer is {rest}."))
    return asked.format(one, two), answer, f"I take {two} away from {one}. {one} - {two} = {rest}."


def _apples_turn(draw: random.Random) -> tuple[str, str, str]:
    name, thing = draw.choice(NAMES), draw.choice(FOODS + OBJECTS)
    one, two = draw.randint(1, 12), draw.randint(1, 9)
    many = plural(thing)
    if draw.random() < 0.5:
        asked = f"{name} has {one} {many} and gets {two} more. How many {many} does {name} have now?"
        total, how = one + two, f"{one} + {two}"
    else:
        one += two
        asked = f"{name} has {one} {many} and gives away {two}. How many {many} does {name} have now?"
        total, how = one - two, f"{one} - {two}"
    counted = f"{total} {thing if total == 1 else many}"
    return asked, f"{name} has {counted} now.", f"I must find out {how}. {how} = {total}."


def _count_turn(draw: random.Random) -> tuple[str, str, str]:
    first = draw.randint(0, 40)
    last = first + draw.randint(2, 12)
    numbers = [str(n) for n in range(first, last + 1)]
    if draw.random() < 0.3:
        asked, answer = f"Count down from {last} to {first}.", ", ".join(reversed(numbers)) + "."
    else:
        asked, answer = (
            draw.choice((f"Count from {first} to {last}.", f"Please count from {first} up to {last}.")),
            ", ".join(numbers) + ".",
        )
    return asked, answer, f"I say every number between {first} and {last} in order."


def _order_turn(draw: random.Random) -> tuple[str, str, str]:
    what, names = draw.choice((("day", _DAYS), ("month", _MONTHS)))
    i, step, word = draw.randrange(len(names)), *draw.choice(((1, "after"), (-1, "before")))
    answer = names[(i + step) % len(names)]
    asked = draw.choice((f"What {what} comes {word} {names[i]}?", f"Which {what} is {word} {names[i]}?"))
    return asked, f"{answer} comes {word} {names[i]}.", f"The {what} {word} {names[i]} is {answer}."


def _opposite_turn(draw: random.Random) -> tuple[str, str, str]:
    pair = draw.choice(_OPPOSITES.split(",")).split()
    draw.shuffle(pair)
    one, two = pair
    asked = draw.choice(
        (
            f"What is the opposite of {one}?",
            f"Tell me the opposite of {one}.",
            f"Which word means the opposite of {one}?",
        )
    )
    return asked, f"The opposite of {one} is {two}.", f"If something is not {one}, it is {two}."


def _repeat_turn(draw: random.Random) -> tuple[str, str, str]:
    words = [
        draw.choice(draw.choice((ANIMALS, COLOURS, FOODS, OBJECTS, PLACES, NAMES))) for _ in range(draw.randint(2, 6))
    ]
    listed = ", ".join(words)
    kind = draw.randrange(3)
    if kind == 0:
        return f"Repeat these words: {listed}.", f"{listed}.", "I say the same words again."
    if kind == 1:
        return (
            f"What is the first word in this list? {listed}",
            f"The first word is {words[0]}.",
            f"The list begins with {words[0]}.",
        )
    return (
        f"What is the last word in this list? {listed}",
        f"The last word is {words[-1]}.",
        f"The list ends with {words[-1]}.",
    )


def plural(noun: str) -> str:
    """Of the nouns in `words.py`, as far as anybody minds."""
    if noun.endswith("y") and noun[-2] not in "aeou":
        return noun[:-1] + "ies"
    if noun.endswith(("s", "sh", "ch", "x")):
        return noun if noun.endswith("scissors") else noun + "es"
    if noun.endswith("fe"):
        return noun[:-2] + "ves"
    return noun + "s"


_TURNS: tuple[Callable[[random.Random], tuple[str, str, str]], ...] = (
    _self_turn, _self_turn, _self_turn, polite_turn, polite_turn, _sum_turn, _sum_turn, _apples_turn, _count_turn, _order_turn,
    _opposite_turn, _repeat_turn, _repeat_turn,
)  # fmt: skip
_FEW = (_self_turn, polite_turn, _order_turn, _opposite_turn)
