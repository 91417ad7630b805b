"""`whalepod golden`: compare the model with golden vectors."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whalepod.engine.interface import Fidelity

if TYPE_CHECKING:
    from whalepod.model.conformity import SetResult


def golden(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory tree of golden vectors.")],
    device: Annotated[str, typer.Option(help="Where the networks run: cpu, cuda or cuda:N.")] = "cpu",
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="By a network in bfloat16 with quantised caches, as a GPU serves it.")
    ] = False,
    fidelity: Annotated[Fidelity, typer.Option(help="Whose arithmetic is compared.")] = Fidelity.EXACT,
    cpu_operators: Annotated[
        bool, typer.Option(help="On a CPU, that of the compiled operators, where they are there.")
    ] = True,
) -> None:
    """Run every set of vectors below DIR, in the format of tests/golden/README.md.

    The last line is one JSON object. Exits with 1 if a set fails.
    """
    import torch
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from whalepod.engine.conformity_serving import run_serving_sets
    from whalepod.engine.rank_model import usable_device
    from whalepod.kernels.native import library
    from whalepod.kernels.numerics import whole_batches
    from whalepod.model.conformity import Status
    from whalepod.model.conformity_runner import run_directory

    torch.set_num_threads(1)
    usable_device(device)
    library.decide(wanted=cpu_operators)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"Golden vectors of {directory}", box=SIMPLE_HEAD)
    table.add_column("set", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("largest difference", no_wrap=True, justify="right")
    table.add_column("detail")
    styles = {Status.PASSED: "green", Status.FAILED: "bold red"}
    results: list[SetResult] = []
    with console.status("loading") as status, whole_batches(fidelity is Fidelity.FAST):
        runners = {"serving": run_serving_sets}
        for result in run_directory(directory, runners=runners, device=device, rounded=bfloat16):
            results.append(result)
            status.update(f"{result.name}: {result.status.value}")
            difference = "" if result.max_abs is None else f"{result.max_abs:.1e}"
            style = styles.get(result.status, "dim")
            table.add_row(escape(result.name), f"[{style}]{result.status.value}[/]", difference, escape(result.detail))
    console.print(table)
    figures = summarize(results)
    typer.echo(json.dumps(figures))
    raise typer.Exit(code=0 if figures["passed"] else 1)


def summarize(results: Sequence[SetResult]) -> dict[str, object]:
    """The command's figures. A tree in which nothing was compared has not passed."""
    statuses = Counter(result.status.name.lower() for result in results)
    return {
        "passed": statuses["passed"] > 0 and statuses["failed"] == 0,
        "max_abs": max((result.max_abs for result in results if result.max_abs is not None), default=None),
        "sets": {name: statuses[name] for name in ("passed", "failed", "not_implemented", "not_applicable")},
    }
