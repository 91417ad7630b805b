"""`whalepod prefill`, `decode` and `vision`: one rank in this process, as a pod runs it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Annotated

import typer
import uvloop

from whalepod.cluster.config import ClusterConfig
from whalepod.services.decode.process import run_decode_rank
from whalepod.services.prefill.process import run_prefill_rank
from whalepod.services.vision.process import run_vision_rank

from .cluster_options import with_cluster_config

Index = Annotated[int, typer.Option("--index", min=0, envvar="WHALEPOD_INDEX", help="Which rank of its pool this is.")]


@with_cluster_config
def prefill(config: ClusterConfig, index: Index = 0) -> None:
    """Serve as one prefill rank until SIGTERM, then finish what is here and exit with 0."""
    uvloop.run(_until_signalled(lambda stop: run_prefill_rank(config, index, stop=stop)))


@with_cluster_config
def decode(config: ClusterConfig, index: Index = 0) -> None:
    """Serve as one decode rank until SIGTERM, then finish what is here and exit with 0."""
    uvloop.run(_until_signalled(lambda stop: run_decode_rank(config, index, stop=stop)))


@with_cluster_config
def vision(config: ClusterConfig, index: Index = 0) -> None:
    """Serve as one vision rank until SIGTERM, then finish what is here and exit with 0."""
    uvloop.run(_until_signalled(lambda stop: run_vision_rank(config, index, stop=stop)))


async def _until_signalled(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(stop)
