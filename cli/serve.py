"""`whalepod serve`: a whole cluster on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

import typer
from rich.console import Console

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.free_ports import busy_ports
from whalepod.cluster.local import LocalCluster
from whalepod.cluster.serve_lock import AlreadyServingError, ServeLock
from whalepod.cluster.shipped_model import SHIPPED_MODEL_NAME, shipped_model_dir
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.errors import UnavailableError
from whalepod.model.checkpoint import check_tensors
from whalepod.model.config import ModelConfig

from .cluster_options import with_cluster_config
from .user_dirs import state_dir

FAILURE_POLL_S: Final = 1.0
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@with_cluster_config
def serve(config: ClusterConfig) -> None:
    """Start Redis, Ray, a prefill pool, a decode pool and a router here, and serve until interrupted."""
    console = Console(highlight=False, soft_wrap=True)
    if config.model is not None:
        check_tensors(config.model, ModelConfig.from_dir(config.model))
    lock = ServeLock(state_dir(), config.router.http_port)
    try:
        lock.acquire()
    except AlreadyServingError as error:
        console.print(f"{error}. Stop it with Ctrl-C where it runs, or choose other ports: --http-port and the like.")
        raise typer.Exit(1) from None
    try:
        _refuse_busy_ports(config, console)
        config = with_model(config, say=console.print)
        ModelConfig.from_dir(config.model_dir).check_kept_rows(config.engine.kept_rows)
        asyncio.run(_serve(config, lock, console))
    except UnavailableError as error:
        console.print(f"whalepod: {error}")
        raise typer.Exit(1) from None
    finally:
        lock.release()


def with_model(config: ClusterConfig, *, say: Callable[[str], None]) -> ClusterConfig:
    """`config`, serving the model that ships if it names none."""
    if config.model is not None:
        return config
    say(f"no --model given: serving {SHIPPED_MODEL_NAME}, the small model that ships")
    directory = shipped_model_dir()
    name = config.served_model_name or SHIPPED_MODEL_NAME
    return config.model_copy(update={"model": str(directory), "served_model_name": name})


def _refuse_busy_ports(config: ClusterConfig, console: Console) -> None:
    busy = busy_ports(config)
    for setting, port in busy.items():
        console.print(f"port {port} ({setting}) is in use by another program: stop it, or choose another port")
    if busy:
        raise typer.Exit(1)


async def _serve(config: ClusterConfig, lock: ServeLock, console: Console) -> None:
    started_s = SYSTEM_CLOCK.monotonic_s()
    cluster = LocalCluster(config, say=console.print)
    stop = _stop_on_signals(console)
    try:
        lock.publish(http_url=cluster.http_url, config_file=cluster.config_file)
        if await _until_stopped(cluster.start(), stop) and await _until_stopped(cluster.wait_ready(), stop):
            console.print(f"ready after {SYSTEM_CLOCK.monotonic_s() - started_s:.0f} s\n")
            _print_how_to_use(cluster, console)
            await _until_stopped(_raise_first_failure(cluster), stop)
        console.print("stopping")
    finally:
        await cluster.stop()
    console.print("stopped")


def _stop_on_signals(console: Console) -> asyncio.Event:
    """Set by the first signal. The second one stops at once: the janitor ends what is left."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            console.print("stopping at once")
            os._exit(1)
        stop.set()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


async def _until_stopped(work: Coroutine[object, object, None], stop: asyncio.Event) -> bool:
    """True: `work` is done. False: it was cancelled because `stop` came first."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        task.cancel()
    if task.done() and not stop.is_set():
        await task
        return True
    await asyncio.wait((task,))
    return False


async def _raise_first_failure(cluster: LocalCluster) -> None:
    while True:
        await cluster.raise_failure()
        await asyncio.sleep(FAILURE_POLL_S)


def _own_command() -> str:
    """What starts this program from the shell that started it: its name alone only where that is enough."""
    called = Path(sys.argv[0])
    if called.name != "whalepod":
        return f"{shlex.quote(sys.executable)} -m whalepod"
    found = shutil.which("whalepod")
    return "whalepod" if found and called.exists() and Path(found).samefile(called) else shlex.quote(str(called))


def _print_how_to_use(cluster: LocalCluster, console: Console) -> None:
    body = {
        "model": cluster.config.model_name,
        "messages": [{"role": "user", "content": "Who are you?"}],
        "thinking": {"type": "disabled"},
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    url = f"{cluster.http_url}/v1/chat/completions"
    key = "" if cluster.config.router.api_keys_file is None else "-H 'Authorization: Bearer KEY' "
    console.print(f"  curl -N {url} {key}-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}")
    console.print(f"  {_own_command()} chat --url {cluster.http_url}")
    operators = cluster.config.operator_url
    console.print(f"\ndashboard: {operators}/dashboard    metrics: {operators}/metrics")
    console.print("Ctrl-C stops everything that was started here")
