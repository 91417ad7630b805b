"""`whalepod pool`: change the pools of the cluster that `whalepod serve` runs here, while it serves."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from whalepod.cluster.pool_control import ask_pool_control
from whalepod.cluster.serve_lock import serving_record
from whalepod.core.errors import UnavailableError

from .user_dirs import state_dir

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


class Pool(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    VISION = "vision"


WhichPool = Annotated[Pool, typer.Argument(metavar="POOL", help="prefill, decode or vision.")]
HttpPort = Annotated[int, typer.Option(help="The cluster: the port of its HTTP API.")]


@app.command()
def scale(
    pool: WhichPool,
    replicas: Annotated[int, typer.Argument(metavar="N", min=0, help="Ranks that the pool shall have.")],
    http_port: HttpPort = 8000,
) -> None:
    """Start ranks, or drain those with the highest numbers: their streams finish, or go on elsewhere."""
    _do(http_port, {"do": "scale", "pool": pool.value, "replicas": replicas})


@app.command()
def replace(pool: WhichPool, http_port: HttpPort = 8000) -> None:
    """Give every rank a new process, one after another. Each drains first, and the next waits until it is back."""
    _do(http_port, {"do": "replace", "pool": pool.value})


def _do(http_port: int, request: dict[str, object]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    record = serving_record(state_dir(), http_port)
    if record is None:
        console.print(f"no cluster serves on port {http_port} here: name its port with --http-port")
        raise typer.Exit(1)
    try:
        asyncio.run(_follow(Path(record.config_file).parent, request, console))
    except UnavailableError as error:
        console.print(f"whalepod: {error}")
        raise typer.Exit(1) from None


async def _follow(run_dir: Path, request: dict[str, object], console: Console) -> None:
    async for line in ask_pool_control(run_dir, request):
        console.print(line)
