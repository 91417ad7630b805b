"""Gives a command one flag for each setting of a cluster, and the validated result.

    @with_cluster_config
    def router(config: ClusterConfig) -> None: ...

A command that only looks at a cluster takes the same flags, and lists few (`with_known_cluster`). Flags keep their
text: parsing and refusing is `load_config`'s work, the same for flags, variables and YAML.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import Setting, load_config, settings, unknown_variables
from whalepod.core.logs import configure_logging

log = logging.getLogger("whalepod.cli")

ROOT_SETTINGS = ("log_level", "log_json")
"""Settings that every command has a flag for already (`cli/main.py`)."""

FINDING = ("model", "redis_url", "redis_port", "secret_file", "router.http_port", "kv.urls", "tls.peer_cert_file")
"""Settings that say which cluster is meant."""


def with_cluster_config(command: Callable[..., None]) -> Callable[..., None]:
    """The command, its parameter `config: ClusterConfig` replaced by `--config FILE` and a flag for each setting."""
    return _with_settings(command)


def with_known_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """The same, of whose flags `--help` lists those alone that say which cluster is meant."""
    return _with_settings(command, listed=FINDING)


def _with_settings(command: Callable[..., None], *, listed: Collection[str] = ()) -> Callable[..., None]:
    """`listed`: keys of the settings that `--help` lists; none: all."""
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "config"]
    offered = [setting for setting in settings() if setting.key not in ROOT_SETTINGS]

    @functools.wraps(command)
    def run(context: typer.Context, config_file: Path | None, **values: Any) -> None:  # noqa: ANN401  whatever typer has parsed
        given = {setting.flag: values.pop(_parameter_name(setting)) for setting in offered}
        flags = {flag: _text(value) for flag, value in given.items() if value is not None}
        command(config=resolve_config(context, config_file, flags), **values)

    parameters = [
        _parameter("context", typer.Context),
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own),
        _parameter("config_file", _config_file(all_listed=not listed), default=None),
        *(
            _parameter(
                _parameter_name(each), _option(each, hidden=each.key not in (listed or (each.key,))), default=None
            )
            for each in offered
        ),
    ]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def resolve_config(context: typer.Context, file: Path | None, flags: Mapping[str, str]) -> ClusterConfig:
    """All sources together. Logging follows the result: the file may set it too. Raises ConfigError."""
    for variable, near in unknown_variables(os.environ).items():
        log.warning("unknown variable", extra={"variable": variable, "did_you_mean": near})
    config = load_config(file=file, variables=os.environ, flags={**_root_flags(context), **flags})
    configure_logging(level=config.log_level, as_json=config.log_json)
    return config


def _root_flags(context: typer.Context) -> dict[str, str]:
    """`--log-level` and `--log-json`, if they were written on the command line."""
    root = context.find_root()
    names = [name for name in ROOT_SETTINGS if _was_written(root, name)]
    return {"--" + name.replace("_", "-"): _text(root.params[name]) for name in names}


def _was_written(context: Any, name: str) -> bool:  # noqa: ANN401  the context's type is private to typer
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _parameter(name: str, annotation: object, *, default: object = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _parameter_name(setting: Setting) -> str:
    return "setting_" + setting.name


def _config_file(*, all_listed: bool) -> object:
    rest = "" if all_listed else " Each setting is a flag here, too: those that are not listed are in `serve --help`."
    option = typer.Option(
        "--config", envvar="WHALEPOD_CONFIG", show_default=False, help=f"YAML file of settings.{rest}"
    )
    return Annotated[Path | None, option]


def _option(setting: Setting, *, hidden: bool) -> object:
    """The annotation that typer reads. Everything but a switch is text; None: not given."""
    default = "" if setting.default in (None, ()) else f"; default: {_text(setting.default)}"
    help_text = f"{setting.description} [{setting.variable}{default}]"
    if setting.is_switch:
        flags = f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(flags, show_default=False, help=help_text, hidden=hidden)]
    metavar = setting.name.rsplit("_", 1)[-1].upper()
    option = typer.Option(setting.flag, show_default=False, metavar=metavar, help=help_text, hidden=hidden)
    return Annotated[str | None, option]


def _text(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return str(value.value)
        case tuple():
            return ",".join(_text(item) for item in value)
        case _:
            return str(value)
