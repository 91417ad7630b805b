"""`whalepod kernels`: the sizes that GPU kernels are launched with on this machine."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from whalepod.core.errors import ConfigError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Keeps `tune` a command of its own, beside those to come."""


@app.command()
def tune(
    kernel: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this one; may be repeated.")] = None,
    rows: Annotated[list[int] | None, typer.Option(min=1, metavar="N", help="At so many; may be repeated.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The table to write; default: sm_90.json or the like, here.", dir_okay=False)
    ] = None,
) -> None:
    """Measure which sizes kernels are quickest with on this machine's GPU, and write a table for
    engine.launch_table_file. A line for each number of rows, and last one JSON object: kernels, lines, changed,
    dropped."""
    if find_spec("triton") is None:
        raise ConfigError("tuning needs Triton: pip install 'whalepod[gpu]'")
    from whalepod.kernels import tuning

    typer.echo(json.dumps(tuning.tune(kernel or [], rows or [], out)))
