"""Where settings come from, and what each is called there.

    flag --decode-replicas  >  variable WHALEPOD_DECODE_REPLICAS  >  YAML key decode.replicas  >  default

All three names follow from the field's path in `ClusterConfig`; the router's settings, which users meet first, leave
their section out of flag and variable (`--http-port`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from whalepod.core.errors import ConfigError
from whalepod.core.upstream_variables import (
    ACCELERATOR,
    FIDELITIES,
    FIXED,
    PREFIX,
    SETTINGS,
    TRANSLATED,
    check_fidelity,
    upstream_values,
)

from .config import ClusterConfig

VARIABLE_PREFIX = "WHALEPOD_"
UNPREFIXED_SECTION = "router"

Path_ = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `default` is the value when nobody says otherwise."""

    path: Path_
    default: object
    description: str
    is_list: bool
    is_switch: bool

    @property
    def key(self) -> str:
        """Its place in the YAML file, as `section.name`."""
        return ".".join(self.path)

    @property
    def name(self) -> str:
        return "_".join(self.path[1:] if self.path[0] == UNPREFIXED_SECTION else self.path)

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def settings() -> tuple[Setting, ...]:
    """All settings, in the order of the YAML file."""
    return tuple(_settings_of(ClusterConfig, ()))


def load_config(
    *,
    file: Path | None = None,
    variables: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> ClusterConfig:
    """One validated config. `variables` is the environment, `flags` maps `Setting.flag` to text.

    Raises ConfigError that names every unknown key (with the nearest known one), bad value and contradiction.
    """
    values: dict[str, Any] = _read_yaml(file) if file is not None else {}
    origins: dict[Path_, str] = {}
    for setting, origin, text in _given(variables or {}, flags or {}):
        _put(values, setting.path, _parse(text, setting))
        origins[setting.path] = origin
    try:
        config = ClusterConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None
    set_by = origins.get(("fidelity", "default"), "fidelity.default")
    check_fidelity(variables or {}, fidelity=config.fidelity.default.value, set_by=set_by)
    return config


def unknown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables that start like ours, name no setting, but nearly do: variable to the nearest one.

    Others are left alone: Kubernetes makes `WHALEPOD_PORT_8000_TCP` and the like out of a service's name.
    """
    known = [*(setting.variable for setting in settings()), *SETTINGS, *TRANSLATED, ACCELERATOR, *FIDELITIES, *FIXED]
    strangers = [name for name in variables if name.startswith((VARIABLE_PREFIX, PREFIX)) and name not in known]
    return {name: near[0] for name in strangers if (near := difflib.get_close_matches(name, known, n=1, cutoff=0.85))}


def _settings_of(section: type[BaseModel], path: Path_) -> Iterator[Setting]:
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _settings_of(annotation, (*path, name))
        else:
            yield _setting((*path, name), field)


def _setting(path: Path_, field: FieldInfo) -> Setting:
    return Setting(
        path=path,
        default=field.default,
        description=field.description or "",
        is_list=get_origin(field.annotation) is tuple,
        is_switch=bool in (field.annotation, *get_args(field.annotation)),
    )


def _given(variables: Mapping[str, str], flags: Mapping[str, str]) -> Iterator[tuple[Setting, str, str]]:
    """(setting, where it was set, text), weakest first."""
    by_key = {setting.key: setting for setting in settings()}
    for key, variable, text in upstream_values(variables):
        yield by_key[key], variable, text
    for setting in by_key.values():
        if setting.variable in variables:
            yield setting, setting.variable, variables[setting.variable]
    by_flag = {setting.flag: setting for setting in by_key.values()}
    for flag, text in flags.items():
        if flag not in by_flag:
            raise ConfigError(f"unknown flag {flag}{_nearest(flag, by_flag)}")
        yield by_flag[flag], flag, text


def _parse(text: str, setting: Setting) -> object:
    """Text as pydantic's lax mode takes it; empty means unset."""
    if text == "":
        return [] if setting.is_list else setting.default
    return [part.strip() for part in text.split(",")] if setting.is_list else text


def _put(values: dict[str, Any], path: Path_, value: object) -> None:
    section = values
    for name in path[:-1]:
        inner = section.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{name} must be a section with keys of its own, not {inner!r}")
        section = inner
    section[path[-1]] = value


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold keys and values, not {type(values).__name__}")
    return values


def _explain(error: ValidationError, origins: Mapping[Path_, str]) -> str:
    lines: list[str] = []
    for problem in error.errors():
        path = tuple(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {'.'.join(path)}{_nearest_key(path)}")
        elif problem["type"] == "value_error":
            lines.append(message)
        else:
            name = next(
                (origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in origins), ".".join(path)
            )
            lines.append(f"{name}: {message[0].lower() + message[1:]}, not {problem['input']!r}")
    return "; ".join(lines)


def _nearest_key(path: Path_) -> str:
    """A hint for an unknown key: among its section's keys first, then anywhere."""
    section: type[BaseModel] = ClusterConfig
    for name in path[:-1]:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    hint = _nearest(path[-1], section.model_fields)
    return hint or _nearest(".".join(path), [setting.key for setting in settings()])


def _nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
