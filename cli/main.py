"""The `whalepod` command. Knows the names of its commands and imports one only when it runs.

A command `name` is a function of `cli/name.py`, annotated the way typer reads it, or a `typer.Typer` with commands of
its own. Exit codes: 0 done, 1 failed, 2 used wrongly (flags, settings).
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
import typer.core
import typer.main

from whalepod import __version__
from whalepod.core.errors import CheckpointError, ConfigError
from whalepod.core.logs import LEVELS, configure_logging

EXIT_FAILED = 1
EXIT_USAGE = 2

log = logging.getLogger("whalepod.cli")


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Where a command lives (`module` of `whalepod.cli`, `attribute` in it) and its line in the list."""

    module: str
    attribute: str
    help: str

    @property
    def import_name(self) -> str:
        return f"whalepod.cli.{self.module}"


COMMANDS: Mapping[str, CommandEntry] = {
    "serve": CommandEntry("serve", "serve", "Start a whole cluster on this machine and serve until interrupted."),
    "router": CommandEntry("router", "router", "Run one router: HTTP and gRPC front door, placement, streams."),
    "prefill": CommandEntry("rank", "prefill", "Run one prefill rank."),
    "decode": CommandEntry("rank", "decode", "Run one decode rank."),
    "vision": CommandEntry("rank", "vision", "Run one vision rank."),
    "status": CommandEntry("status", "status", "Show the ranks of a running cluster."),
    "top": CommandEntry("top", "top", "Watch a running cluster: ranks, requests, rates."),
    "pool": CommandEntry("pool", "app", "Add ranks to a pool that serves here, take some away, replace them in turn."),
    "generate": CommandEntry("generate", "generate", "Complete a prompt, in this process or through a cluster."),
    "chat": CommandEntry("chat", "chat", "Talk to a running cluster."),
    "golden": CommandEntry("golden", "golden", "Compare the model with golden vectors."),
    "check-determinism": CommandEntry(
        "check_determinism", "check_determinism", "Check that a request's tokens depend on nothing around it."
    ),
    "canary": CommandEntry("canary", "canary", "Compare a cluster with the single-process oracle, bit for bit."),
    "fault": CommandEntry("fault", "fault", "Make a rank misbehave: kill, pause, delay, corrupt. For staging."),
    "keys": CommandEntry("keys", "app", "Make API keys, list them, take them back."),
    "bench": CommandEntry("bench", "app", "Measure the engine: what steps cost, and what drafts are worth."),
    "dspark": CommandEntry("dspark", "app", "Calibrate the drafter's confidences."),
    "kv": CommandEntry("kv", "app", "Look at the store of KV blocks, purge it, check it, or run its service."),
    "eval": CommandEntry("eval", "evaluate", "Measure what a model has learned, and what ways to serve it cost."),
    "checkpoint": CommandEntry("checkpoint", "app", "Write and inspect checkpoints."),
    "kernels": CommandEntry("kernels", "app", "Find the sizes that GPU kernels are best launched with here."),
    "doctor": CommandEntry("doctor", "doctor", "Check this machine and say what is wrong and how to fix it."),
}


class LazyCommands(typer.core.TyperGroup):
    """Lists commands from the table alone, and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401  typer's business
        super().__init__(**attributes)
        self.commands = {name: typer.core.TyperCommand(name, help=entry.help) for name, entry in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name else None, rest


def load_command(name: str) -> typer.core.TyperCommand | typer.core.TyperGroup:
    """Import the command `name` of COMMANDS."""
    entry = COMMANDS[name]
    target = cast(object, getattr(importlib.import_module(entry.import_name), entry.attribute))
    if isinstance(target, typer.Typer):
        target.info.name, target.info.help = name, entry.help
        return typer.main.get_group(target)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=name, help=entry.help)(cast(Callable[..., None], target))
    return cast(typer.core.TyperCommand, typer.main.get_command(app))


app = typer.Typer(
    cls=LazyCommands,
    name="whalepod",
    help="Serves DeepSeek-V4.1-Flash as a cluster.",
    epilog="--log-level and --log-json may also follow the command.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"whalepod {__version__}")
        raise typer.Exit


def _check_level(level: str) -> str:
    if level.lower() not in LEVELS:
        raise typer.BadParameter(f"{level!r} is none of {', '.join(LEVELS)}")
    return level.lower()


@app.callback()
def root(
    log_level: Annotated[
        str, typer.Option(envvar="WHALEPOD_LOG_LEVEL", callback=_check_level, help=f"One of {', '.join(LEVELS)}.")
    ] = "info",
    log_json: Annotated[
        bool, typer.Option("--log-json", envvar="WHALEPOD_LOG_JSON", help="Log one JSON object a line.")
    ] = False,
    version: Annotated[  # noqa: ARG001  its callback has ended the command
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options of every command."""
    configure_logging(level=log_level, as_json=log_json)


def hoist_log_flags(arguments: Sequence[str]) -> list[str]:
    """Move `--log-level X` and `--log-json` to the front, where the options of every command are read.

    What follows `--` stays where it is.
    """
    front: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--log-json" or word.startswith("--log-level="):
            front.append(word)
        elif word == "--log-level":
            front += [word, *[value for value in [next(words, None)] if value is not None]]
        else:
            rest.append(word)
    return front + rest


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point: runs one command and exits with its code."""
    try:
        app(args=hoist_log_flags(sys.argv[1:] if arguments is None else arguments), prog_name="whalepod")
    except (ConfigError, CheckpointError) as error:
        typer.echo(f"whalepod: {error}", err=True)
        sys.exit(EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED)
    except Exception:
        log.exception("the command failed")
        sys.exit(EXIT_FAILED)
