"""`whalepod check-determinism`: does anything around a request change its tokens?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from whalepod.cluster.shipped_model import shipped_model_dir
from whalepod.core.errors import ServingError

QUICK_SCHEDULES = 20
SCHEDULES = 200


def check_determinism(
    model: Annotated[
        Path | None, typer.Option("--model", help="A checkpoint directory; default: the small model that ships.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_SCHEDULES} schedules.")] = False,
    schedules: Annotated[
        int | None, typer.Option(min=1, help=f"How many schedules; default: {SCHEDULES}, or what --quick says.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same requests and schedules.")] = 0,
) -> None:
    """Run the same requests in `exact` under random arrivals, drops, chunk sizes, drafts and preemptions, and compare.

    Compares tokens and every token's log-probability bit by bit. A check that could not have failed counts as failed.
    The last line is one JSON object of figures.
    """
    from whalepod.engine.determinism import DeterminismPlan, check_determinism
    from whalepod.engine.rank_model import RankModel

    console = Console(highlight=False, soft_wrap=True)
    count = schedules or (QUICK_SCHEDULES if quick else SCHEDULES)
    loaded = RankModel.load(model or shipped_model_dir())
    try:
        report = check_determinism(loaded, DeterminismPlan(schedules=count, seed=seed), say=console.print)
    except ServingError as error:
        console.print(f"whalepod: a request failed: {error}")
        raise typer.Exit(1) from None
    for line in report.details[:10]:
        console.print(line)
    console.print(json.dumps(report.figures()))
    if not report.passed:
        raise typer.Exit(1)
