"""`whalepod router`: one router in this process, as a pod runs it."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from whalepod.cluster.config import ClusterConfig
from whalepod.services.router.process import run_router

from .cluster_options import with_cluster_config


@with_cluster_config
def router(config: ClusterConfig) -> None:
    """Serve HTTP and gRPC until SIGTERM, then finish what is here and exit with 0."""
    uvloop.run(_until_signalled(config))


async def _until_signalled(config: ClusterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def listen_to_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    # Again when the fronts listen: the HTTP server takes the signals for itself when it starts.
    listen_to_signals()
    await run_router(config, stop=stop, on_ready=listen_to_signals)
