"""`whalepod golden`: compare the model with golden vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def golden(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory tree of golden vectors.")],
) -> None:
    """Run every set of vectors below DIR, in the format of tests/golden/README.md.

    The last line is one JSON object. Exits with 1 if a set fails.
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from whalepod.engine.conformity_serving import run_serving_sets
    from whalepod.model.conformity import Status
    from whalepod.model.conformity_runner import run_directory

    torch.set_num_threads(1)
    console = Console()
    styles = {Status.PASSED: "green", Status.FAILED: "bold red"}
    table = Table("set", "result", "largest difference", "detail", title=f"Golden vectors of {directory}")
    with console.status("") as status:
        results = []
        for result in run_directory(directory, runners={"serving": run_serving_sets}):
            results.append(result)
            status.update(f"{result.name}: {result.status.value}")
            difference = "" if result.max_abs is None else f"{result.max_abs:.1e}"
            style = styles.get(result.status, "dim")
            table.add_row(result.name, f"[{style}]{result.status.value}[/]", difference, result.detail)
    console.print(table)
    failed = [result for result in results if result.status is Status.FAILED]
    checked = [result for result in results if result.status in styles]
    figures = {
        "passed": bool(checked) and not failed,
        "max_abs": max((result.max_abs for result in checked if result.max_abs is not None), default=None),
        "sets": len(checked),
        "failed": len(failed),
        "not_implemented": sum(result.status is Status.NOT_IMPLEMENTED for result in results),
    }
    typer.echo(json.dumps(figures))
    raise typer.Exit(code=0 if figures["passed"] else 1)
