"""Turns parsed JSON into frozen dataclasses: the field names are the keys, the annotations the types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from whalepod.core.errors import ConfigError


def read_fields(kind: type[Any], values: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Constructor arguments of the dataclass `kind` from `values`; keys it does not know are ignored.

    A key that is absent, or null where null is no value of the field, takes the field's default.
    Raises ConfigError naming the field: missing without a default, or of another type.
    """
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for entry in fields(kind):
        if not entry.init:
            continue
        value = values.get(entry.name)
        if value is not None:
            arguments[entry.name] = _convert(value, hints[entry.name], f"{where}{entry.name}")
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ConfigError(f"config.json: {where}{entry.name} is missing")
    return arguments


def _convert(value: object, hint: object, name: str) -> object:
    if isinstance(hint, UnionType):
        (hint,) = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"config.json: {name} must be a list, not {value!r}")
        return tuple(_convert(item, get_args(hint)[0], f"{name}[{index}]") for index, item in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, bool, str):
        if type(value) is not hint:
            raise ConfigError(f"config.json: {name} must be of type {hint.__name__}, not {value!r}")
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name} must be an object, not {value!r}")
    assert isinstance(hint, type), f"fields of type {hint} are not read from JSON"
    return hint(**read_fields(hint, value, where=f"{name}."))
