"""Made-up requests for JSON: facts in a sentence, a schema of two to six fields, and the object that holds them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .documents import Document, chat, system, user
from .talk import SYSTEMS, plural
from .words import ANIMALS, CITIES, COLOURS, FEELINGS, FOODS, JOBS, NAMES, OBJECTS, PLACES, THINGS

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_SIZES = ("small", "medium", "large")


@dataclass(frozen=True, slots=True)
class Fact:
    """One field: its possible names, its schema, a value, and how a sentence about {who} says it ({v} is the value)."""

    names: tuple[str, ...]
    schema: Mapping[str, Any]
    draw: Callable[[random.Random], Any]
    says: tuple[str, ...]


_STRING, _WHOLE, _NUMBER, _YES_NO = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def _one_of(values: Sequence[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _some(words: Sequence[str]) -> Callable[[random.Random], list[str]]:
    return lambda d: d.sample(words, d.randint(1, 3))


PERSON = (
    Fact(("age", "years"), _WHOLE, lambda d: d.randint(3, 99), ("{who} is {v} years old", "{who} just turned {v}")),
    Fact(("city", "town", "home"), _STRING, lambda d: d.choice(CITIES), ("{who} lives in {v}", "{who} is from {v}")),
    Fact(("job", "work"), _STRING, lambda d: d.choice(JOBS), ("{who} works as a {v}", "{who} is a {v} by trade")),
    Fact(("color", "favorite_color"), _STRING, lambda d: d.choice(COLOURS), ("{who} likes the color {v}", "{who} wears {v}")),
    Fact(("pet", "animal"), _STRING, lambda d: d.choice(ANIMALS), ("{who} has a {v}", "{who} keeps a {v} as a pet")),
    Fact(("food", "favorite_food"), _STRING, lambda d: d.choice(FOODS), ("{who} loves to eat {v}", "{who} often eats {v}")),
    Fact(("mood", "feeling"), _STRING, lambda d: d.choice(FEELINGS), ("{who} feels {v}", "{who} is {v} today")),
    Fact(("friend", "best_friend"), _STRING, lambda d: d.choice(NAMES), ("{v} is a friend of {who}", "{who} plays with {v}")),
    Fact(("married",), _YES_NO, lambda d: d.random() < 0.5, ("{who} is {not}married",)),
    Fact(("likes_music",), _YES_NO, lambda d: d.random() < 0.5, ("{who} does {not}like music",)),
    Fact(("height_cm", "height"), _WHOLE, lambda d: d.randint(90, 200), ("{who} is {v} cm tall",)),
    Fact(("things", "owns"), {"type": "array", "items": _STRING}, _some(THINGS), ("{who} owns these things: {v}",)),
)  # fmt: skip
GOODS = (
    Fact(("price", "cost"), _NUMBER, lambda d: round(d.uniform(1, 90), 2), ("{who} costs {v} dollars", "the price of {who} is {v}")),
    Fact(("count", "pieces"), _WHOLE, lambda d: d.randint(1, 200), ("there are {v} pieces of {who}", "we have {v} of {who}")),
    Fact(("color",), _STRING, lambda d: d.choice(COLOURS), ("{who} is {v}", "the color of {who} is {v}")),
    Fact(("size",), _one_of(_SIZES), lambda d: d.choice(_SIZES), ("{who} is of {v} size", "{who} comes in {v}")),
    Fact(("place", "location"), _STRING, lambda d: d.choice(PLACES), ("you find {who} at the {v}", "{who} is in the {v}")),
    Fact(("new", "is_new"), _YES_NO, lambda d: d.random() < 0.5, ("{who} is {not}new",)),
    Fact(("owner",), _STRING, lambda d: d.choice(NAMES), ("{who} belongs to {v}", "{v} owns {who}")),
    Fact(("weight", "weight_kg"), _NUMBER, lambda d: round(d.uniform(0.1, 40), 1), ("{who} weighs {v} kg",)),
    Fact(("day", "delivery_day"), _one_of(_DAYS), lambda d: d.choice(_DAYS), ("{who} arrives on {v}", "{who} comes on {v}")),
    Fact(("colors",), {"type": "array", "items": _STRING}, _some(COLOURS), ("you can have {who} in these colors: {v}",)),
)  # fmt: skip
VISIT = (
    Fact(("day",), _one_of(_DAYS), lambda d: d.choice(_DAYS), ("{who} is on {v}", "{v} is the day of {who}")),
    Fact(("city", "place"), _STRING, lambda d: d.choice(CITIES), ("{who} is in {v}", "{who} takes place in {v}")),
    Fact(("guests", "people"), _WHOLE, lambda d: d.randint(2, 300), ("{v} people come to {who}", "{who} has {v} guests")),
    Fact(("host",), _STRING, lambda d: d.choice(NAMES), ("{v} invites everybody to {who}", "{v} is the host of {who}")),
    Fact(("food",), {"type": "array", "items": _STRING}, _some(FOODS), ("at {who} there is {v}",)),
    Fact(("outside",), _YES_NO, lambda d: d.random() < 0.5, ("{who} is {not}outside",)),
    Fact(("hour", "start_hour"), _WHOLE, lambda d: d.randint(6, 22), ("{who} begins at {v}", "{who} starts at {v} o'clock")),
    Fact(("ticket_price", "price"), _NUMBER, lambda d: round(d.uniform(1, 60), 2), ("a ticket for {who} costs {v}",)),
)  # fmt: skip
_EVENTS = (
    "the party",
    "the concert",
    "the market",
    "the school fair",
    "the race",
    "the picnic",
    "the dinner",
    "the wedding",
)
_ABOUT: tuple[tuple[tuple[str, ...], Callable[[random.Random], str], tuple[Fact, ...]], ...] = (
    (("name", "person", "first_name"), lambda d: d.choice(NAMES), PERSON),
    (("item", "product", "thing"), lambda d: d.choice(OBJECTS + THINGS), GOODS),
    (("event", "what"), lambda d: d.choice(_EVENTS).removeprefix("the "), VISIT),
)
_ASKS = (
    "Put this into JSON: {text}", "Give me this as JSON. {text}", "{text} Write that as JSON.", "Extract the facts as JSON: {text}",
    "{text} Answer with JSON only.", "Turn this into a JSON object: {text}", "Read this and fill in the JSON. {text}",
)  # fmt: skip


def json_document(draw: random.Random) -> Document:
    """With a schema in the request, or in words, or for any object at all."""
    first_names, draw_who, pool = draw.choice(_ABOUT)
    who = draw_who(draw)
    facts = draw.sample(pool, draw.randint(1, 5))
    first = draw.choice(first_names)
    schemas: dict[str, Any] = {first: dict(_STRING)}
    values: dict[str, Any] = {first: who}
    said: list[str] = []
    for fact in facts:
        name = draw.choice([name for name in fact.names if name not in values] or [fact.names[0] + "_2"])
        schemas[name], values[name] = dict(fact.schema), fact.draw(draw)
        said.append(_said(draw, fact, values[name], who if pool is PERSON else f"the {who}"))
    order = list(values)
    draw.shuffle(order)
    values, schemas = {name: values[name] for name in order}, {name: schemas[name] for name in order}
    text = " ".join(_sentence(part) for part in draw.sample(said, len(said)))
    return _request(draw, text, values, schemas, said[0])


def _request(
    draw: random.Random, text: str, values: Mapping[str, Any], schemas: Mapping[str, Any], fact: str
) -> Document:
    asked = draw.choice(_ASKS).format(text=text)
    fields: dict[str, Any] = {}
    way = draw.random()
    if way < 0.6:
        schema = {"type": "object", "properties": schemas, "required": list(schemas), "additionalProperties": False}
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    else:
        names = ", ".join(schemas)
        asked += draw.choice((f" Use the fields {names}.", f" The JSON has the keys {names}.", f" Fields: {names}."))
        if way < 0.8:
            fields["response_format"] = {"type": "json_object"}
    messages = [system(draw.choice(SYSTEMS))] if draw.random() < 0.2 else []
    thinks = draw.random() < 0.15
    return chat(
        "json", f"json|{fact}|{len(values)}", [*messages, user(asked)], json.dumps(values),
        reasoning=f"The JSON needs {', '.join(values)}." if thinks else None, **fields,
    )  # fmt: skip


def _said(draw: random.Random, fact: Fact, value: object, who: str) -> str:
    says = draw.choice(fact.says)
    if isinstance(value, bool):
        return says.format(who=who, **{"not": "" if value else "not "}).replace("does like", "does like")
    spoken = " and ".join(value) if isinstance(value, list) else value
    return says.format(who=who, v=spoken)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


_INVENT = (
    ("person", ("name", "age", "city"), lambda d: (d.choice(NAMES), d.randint(5, 90), d.choice(CITIES))),
    ("animal", ("animal", "color", "food"), lambda d: (d.choice(ANIMALS), d.choice(COLOURS), d.choice(FOODS))),
    ("shopping list", ("items", "shop"), lambda d: (d.sample(FOODS, d.randint(2, 4)), "the " + d.choice(PLACES))),
    ("toy", ("toy", "color", "price"), lambda d: (d.choice(THINGS), d.choice(COLOURS), round(d.uniform(1, 50), 2))),
    ("worker", ("name", "job", "happy"), lambda d: (d.choice(NAMES), d.choice(JOBS), d.random() < 0.5)),
)
_TYPES = {str: _STRING, int: _WHOLE, float: _NUMBER, bool: _YES_NO, list: {"type": "array", "items": _STRING}}


def invented_document(draw: random.Random) -> Document:
    """An object that is asked for without saying what is in it."""
    what, names, drawn = draw.choice(_INVENT)
    values = dict(zip(names, drawn(draw), strict=True))
    schema = {
        "type": "object",
        "properties": {n: dict(_TYPES[type(v)]) for n, v in values.items()},
        "required": list(names),
    }
    asked = draw.choice(
        (
            f"Invent a {what} and describe it as JSON.",
            f"Give me a {what} as JSON.",
            f"Make up some {plural(what)} data. One JSON object.",
        )
    )
    fields: dict[str, Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    }
    if draw.random() < 0.3:
        asked += f" Use the keys {', '.join(names)}."
        fields = {"response_format": {"type": "json_object"}} if draw.random() < 0.5 else {}
    return chat("json", f"invent|{what}|{asked}|{draw.randrange(50)}", [user(asked)], json.dumps(values), **fields)
