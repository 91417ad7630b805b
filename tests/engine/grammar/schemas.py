"""200 JSON schemas: written by hand where a feature has an edge, drawn from one seed where features meet.

Strings and arrays are bounded, so that a model that says anything at random comes to an end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

SCHEMAS_TOTAL = 200
_SEED = 20261129


def schemas() -> list[Schema]:
    drawn = random.Random(_SEED)
    found = {json.dumps(schema): schema for schema in WRITTEN}
    while len(found) < SCHEMAS_TOTAL:
        schema = _draw(drawn, depth=0)
        found.setdefault(json.dumps(schema), schema)
    return list(found.values())


def obj(properties: Schema, *, required: list[str] | None = None, **more: Any) -> Schema:
    """An object of these properties and no others, all required unless told."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


def text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def several(items: Schema, most: int, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


INTEGER: Schema = {"type": "integer", "minimum": -999, "maximum": 999}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}

_NUMBERS: list[Schema] = [
    {"type": "integer", "minimum": 0, "maximum": 0},
    {"type": "integer", "minimum": -1, "maximum": 1},
    {"type": "integer", "minimum": 7, "maximum": 1234},
    {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 100},
    {"type": "integer", "minimum": -1000, "maximum": -10},
    {"type": "integer", "minimum": 99, "maximum": 10001},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": -2.5, "maximum": 2.5},
    {"type": "number", "minimum": 0.125, "maximum": 17.75},
    {"type": ["integer", "null"], "minimum": 1, "maximum": 12},
]

_STRINGS: list[Schema] = [
    text(0),
    text(1, minLength=1),
    text(5, minLength=5),
    text(12),
    {"type": "string", "pattern": "^[a-z]{3}$"},
    {"type": "string", "pattern": "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){0,2}$"},
    {"type": "string", "pattern": "^\\d{4}-\\d{2}-\\d{2}$"},
    {"type": "string", "pattern": "^(\\+\\d{1,3} )?\\d{6,9}$"},
    {"type": "string", "pattern": "^#([0-9a-f]{3}|[0-9a-f]{6})$"},
    {"type": "string", "pattern": "^[\u4e00-\u9fff]{2,4}$"},
    {"type": "string", "pattern": "^[а-яё]{1,6}$"},
    {"type": "string", "pattern": "^(😀|🎉|👍🏽|é|é){1,4}$"},
    {"type": "string", "pattern": '^["\\\\/]{1,3}$'},
    {"type": "string", "pattern": "^a{2}b?c*d{0,2}$", "maxLength": 8},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
]

_ENUMS: list[Schema] = [
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, -3, True, False, None, "one", [1, 2], {"k": "v"}]},
    {"enum": ["", " ", "\n", '"', "\\", "/", "\u2028", "\t\r\b\f"]},
    {"enum": ["日本語", "한국어", "العربية", "😀", "e\u0301", "ﬀ"]},
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"const": "exactly this"},
    {"const": {"nested": [1, {"deep": None}], "ключ": "значение"}},
    {"const": 0},
    {"const": [[], [[]], {}]},
    {"type": "string", "enum": [f"option_{index}" for index in range(60)]},
]

_OBJECTS: list[Schema] = [
    obj({}),
    obj({"name": text(10), "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    obj({"a": BOOLEAN, "b": NULL, "c": DIGIT}, required=["b"]),
    obj({"a": DIGIT, "b": DIGIT, "c": DIGIT, "d": DIGIT}, required=[]),
    obj({"имя": text(6), "年齢": INTEGER, "🎈": BOOLEAN}),
    obj({'quo"te': DIGIT, "back\\slash": DIGIT, "new\nline": DIGIT, "": DIGIT}),
    obj({"a": obj({"b": obj({"c": obj({"d": obj({"e": BOOLEAN})})})})}),
    {
        "type": "object",
        "properties": {"id": DIGIT},
        "required": ["id"],
        "additionalProperties": False,
        "maxProperties": 1,
    },
    {"type": "object", "patternProperties": {"^x[0-9]$": DIGIT}, "additionalProperties": False, "maxProperties": 2},
    {"type": "object", "additionalProperties": DIGIT, "maxProperties": 0},
    obj({"type": {"const": "circle"}, "radius": {"type": "number", "minimum": 0, "maximum": 10}}, title="Shape"),
    obj({"a": {"type": "string", "default": "x", "maxLength": 3, "description": "with “quotes”"}}),
]

_ARRAYS: list[Schema] = [
    several(DIGIT, 0),
    several(DIGIT, 3),
    several(BOOLEAN, 2, minItems=2),
    several(several(DIGIT, 2), 2),
    several(obj({"k": text(4)}), 2, minItems=1),
    {"type": "array", "prefixItems": [text(3), DIGIT, BOOLEAN], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [DIGIT], "items": NULL, "maxItems": 3},
    several({"enum": ["a", "b"]}, 4, minItems=1),
    several({"type": ["string", "null"], "maxLength": 2}, 3),
]

_COMBINED: list[Schema] = [
    {"anyOf": [DIGIT, text(3), NULL]},
    {"anyOf": [obj({"cat": text(3)}), obj({"dog": DIGIT})]},
    {"oneOf": [obj({"kind": {"const": "a"}, "x": DIGIT}), obj({"kind": {"const": "b"}, "y": BOOLEAN})]},
    {"oneOf": [BOOLEAN, NULL]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "object", "properties": {"a": DIGIT}}, obj({"a": {"minimum": 5}})]},
    {"type": ["boolean", "null"]},
    {"type": ["object", "array"], "properties": {}, "additionalProperties": False, "maxItems": 0},
    {"$ref": "#/$defs/digit", "$defs": {"digit": DIGIT}},
    {**obj({"a": {"$ref": "#/$defs/s"}, "b": {"$ref": "#/$defs/s"}}), "$defs": {"s": text(3)}},
    {"definitions": {"n": DIGIT}, **several({"$ref": "#/definitions/n"}, 3)},
]

# Each level closes more often than it opens another, whatever the draw.
_RECURSIVE: list[Schema] = [
    {
        "$ref": "#/$defs/tree",
        "$defs": {"tree": obj({"v": DIGIT, "kids": several({"$ref": "#/$defs/tree"}, 1)}, required=["v"])},
    },
    {
        "$ref": "#/$defs/list",
        "$defs": {"list": {"anyOf": [NULL, obj({"head": DIGIT, "tail": {"$ref": "#/$defs/list"}})]}},
    },
    {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": {"anyOf": [NULL, BOOLEAN, obj({"odd": {"$ref": "#/$defs/odd"}})]},
            "odd": {"anyOf": [DIGIT, obj({"even": {"$ref": "#/$defs/even"}})]},
        },
    },
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    obj({"next": {"anyOf": [NULL, {"$ref": "#"}]}, "value": text(3)}),
    {
        "$ref": "#/$defs/expr",
        "$defs": {
            "expr": {
                "anyOf": [
                    DIGIT,
                    {"enum": ["x", "y", "z"]},
                    obj({"op": {"enum": ["+", "-"]}, "left": DIGIT, "right": {"$ref": "#/$defs/expr"}}),
                ]
            }
        },
    },
]

_REAL: list[Schema] = [
    obj(
        {
            "city": text(20, minLength=1),
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        required=["city"],
    ),
    obj(
        {
            "invoice": {"type": "string", "pattern": "^INV-[0-9]{6}$"},
            "lines": several(
                obj({"sku": {"type": "string", "pattern": "^[A-Z0-9]{4,8}$"}, "quantity": {**DIGIT, "minimum": 1}}),
                2,
                minItems=1,
            ),
            "paid": BOOLEAN,
            "note": {"type": ["string", "null"], "maxLength": 12},
        }
    ),
    obj(
        {
            "reasoning": several(obj({"step": {"type": "integer", "minimum": 1, "maximum": 9}, "text": text(15)}), 2),
            "answer": text(12),
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        }
    ),
    obj(
        {
            "action": {
                "anyOf": [
                    obj({"type": {"const": "move"}, "to": {"enum": ["north", "south", "east", "west"]}}),
                    obj({"type": {"const": "say"}, "words": text(10)}),
                    obj({"type": {"const": "wait"}}),
                ]
            }
        }
    ),
]

WRITTEN: list[Schema] = [
    BOOLEAN,
    NULL,
    *_NUMBERS,
    *_STRINGS,
    *_ENUMS,
    *_OBJECTS,
    *_ARRAYS,
    *_COMBINED,
    *_RECURSIVE,
    *_REAL,
]

_KEYS = ["a", "b", "name", "value", "items", "größe", "数", "with space", "snake_case", "x-y", "0", "_"]
_WORDS = ["yes", "no", "", "é", "混ぜる", "🙂", "tab\t", '"quoted"', "a/b", "null", "0", "longer text with spaces"]
_PATTERNS = ["^[ab]{1,4}$", "^[0-9]{2}:[0-9]{2}$", "^(x|yy|zzz)$", "^[^a-zA-Z0-9\\s]{1,3}$", "^\\w{1,6}$", "^é?ü?$"]


def _draw(drawn: random.Random, *, depth: int) -> Schema:
    if depth >= 3 or (depth and drawn.random() < 0.4):
        return drawn.choice(_LEAVES)(drawn)
    return drawn.choice([_object, _object, _array, _any_of, _nullable])(drawn, depth)


def _integer(drawn: random.Random) -> Schema:
    low = drawn.randint(-5000, 5000)
    return {"type": "integer", "minimum": low, "maximum": low + drawn.randint(0, 9000)}


def _number(drawn: random.Random) -> Schema:
    low = drawn.randint(-400, 400) / drawn.choice([1, 2, 4, 10])
    return {"type": "number", "minimum": low, "maximum": low + drawn.randint(1, 300) / 4}


def _string(drawn: random.Random) -> Schema:
    low = drawn.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + drawn.randint(0, 12)}


def _pattern(drawn: random.Random) -> Schema:
    return {"type": "string", "pattern": drawn.choice(_PATTERNS)}


def _enum(drawn: random.Random) -> Schema:
    values = [*drawn.sample(_WORDS, drawn.randint(1, 5)), *drawn.sample([0, 1.5, None, -7], drawn.randint(0, 2))]
    return {"enum": values}


_LEAVES: list[Callable[[random.Random], Schema]] = [
    _integer, _number, _string, _pattern, _enum, lambda _: BOOLEAN, lambda _: NULL,
]  # fmt: skip


def _object(drawn: random.Random, depth: int) -> Schema:
    keys = drawn.sample(_KEYS, drawn.randint(0, 4))
    required = [key for key in keys if drawn.random() < 0.6]
    return obj({key: _draw(drawn, depth=depth + 1) for key in keys}, required=required)


def _array(drawn: random.Random, depth: int) -> Schema:
    least = drawn.randint(0, 2)
    return several(_draw(drawn, depth=depth + 1), least + drawn.randint(0, 1), minItems=least)


def _any_of(drawn: random.Random, depth: int) -> Schema:
    return {"anyOf": [_draw(drawn, depth=depth + 1) for _ in range(drawn.randint(2, 3))]}


def _nullable(drawn: random.Random, depth: int) -> Schema:
    return {"anyOf": [_draw(drawn, depth=depth + 1), NULL]}
