"""`whalepod router`: one router, as a pod runs it, in this process or in several that share its ports."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

import httpx
import typer
import uvloop

from whalepod.cluster.child_process import SupervisedChild
from whalepod.cluster.config import ClusterConfig
from whalepod.core.clock import Deadline
from whalepod.core.errors import UnavailableError
from whalepod.services.router.joint_memory import create_memory, note_ended
from whalepod.services.router.process import check_ports, run_router

from .cluster_options import with_cluster_config

log = logging.getLogger(__name__)

LOOK_S = 0.5
HUNG_AFTER_S = 15.0
STOP_SLACK_S = 5.0
"""What stopping may take beyond draining."""


@with_cluster_config
def router(
    config: ClusterConfig,
    process: Annotated[int | None, typer.Option(hidden=True, help="Which of router.processes this is.")] = None,
    parent: Annotated[int, typer.Option(hidden=True, help="Who has started it.")] = 0,
    memory: Annotated[int | None, typer.Option(hidden=True, help="What it shares with the others.")] = None,
) -> None:
    """Serve HTTP and gRPC until SIGTERM, then finish what is here and exit with 0."""
    if config.router.process_count > 1 and process is None:
        uvloop.run(_run_processes(config))
    else:
        uvloop.run(_run_one(config, process, parent, memory))


async def _run_processes(config: ClusterConfig) -> None:
    """Processes that share ports, limits, and what they know of prefixes: one that dies or hangs is started again, and
    all drain at a time.

    Raises ConfigError if a port is taken, UnavailableError if one of them does not stay.
    """
    check_ports(config)
    memory = create_memory()
    children = [
        SupervisedChild(
            f"router process {index}",
            _command(config, index, memory),
            inherits=[memory],
            on_end=partial(note_ended, memory, index),
        )
        for index in range(config.router.process_count)
    ]
    stop = asyncio.Event()
    _on_signals(stop.set)
    watching: list[asyncio.Task[None]] = []
    try:
        for child, url in zip(children, config.operator_urls, strict=True):
            await child.start()
            watching.append(asyncio.create_task(_end_when_hung(child, f"{url}/livez")))
        while not stop.is_set():
            for child in children:
                if child.failure is not None:
                    raise UnavailableError(child.failure)
            await _wait(stop, LOOK_S)
    finally:
        for task in watching:
            task.cancel()
        patience_s = config.router.drain_seconds + STOP_SLACK_S
        await asyncio.gather(*(child.stop(timeout_s=patience_s) for child in children))


def _command(config: ClusterConfig, index: int, memory: int) -> list[str]:
    """How many there are is said again: here it may not be known, but guessed from the cores of this moment."""
    mine = ("--parent", os.getpid(), "--memory", memory, "--processes", config.router.process_count, "--process", index)
    return [sys.executable, "-m", "whalepod", *sys.argv[1:], *map(str, mine)]


async def _end_when_hung(child: SupervisedChild, url: str) -> None:
    """For ever: connections that the system gives to one that answers no more would wait for it. One that does not
    listen yet is starting, for as long as it takes."""
    patience = Deadline.after(HUNG_AFTER_S)
    async with httpx.AsyncClient(trust_env=False, timeout=HUNG_AFTER_S / 3) as client:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await client.get(url)
            except httpx.TimeoutException:
                if not patience.expired:
                    continue
                log.error("a router process has not answered for %g s and is killed: %s", HUNG_AFTER_S, url)
                child.kill()
            except httpx.HTTPError:
                pass  # nobody listens there
            patience = Deadline.after(HUNG_AFTER_S)


async def _run_one(config: ClusterConfig, process: int | None, parent: int, memory: int | None) -> None:
    stop, orphaned = asyncio.Event(), asyncio.Event()

    def listen_to_signals() -> None:
        _on_signals(stop.set)

    # Again when the fronts listen: the HTTP server takes the signals for itself when it starts.
    listen_to_signals()
    watching = None if process is None else asyncio.create_task(_stop_without(parent, stop, orphaned))
    await run_router(
        config, stop=stop, on_ready=listen_to_signals, index=process or 0, orphaned=orphaned, memory_file=memory
    )
    if watching is not None:
        watching.cancel()


async def _stop_without(parent: int, stop: asyncio.Event, orphaned: asyncio.Event) -> None:
    """Nobody else would: it has a session of its own. The parent may be gone before this begins."""
    while os.getppid() == parent:
        await asyncio.sleep(LOOK_S)
    orphaned.set()
    stop.set()


def _on_signals(call: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, call)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
