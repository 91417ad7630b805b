"""The cluster that a job works with: one that serves already (`--url`), or one of its own, in the Ray it runs in."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path

import httpx
from rich.console import Console

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import load_config, settings
from whalepod.cluster.free_ports import SEARCH_FROM, with_free_ports
from whalepod.cluster.local import running_cluster
from whalepod.cluster.shipped_model import SHIPPED_MODEL_NAME, shipped_model_dir
from whalepod.core.errors import ConfigError, ServingError, UnavailableError
from whalepod.core.logs import configure_logging

RAY_ADDRESS = "RAY_ADDRESS"
"""Set in every job: the Ray that runs it."""


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="YAML file of settings of a cluster of its own")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, for example decode.replicas=2"
    )


def job_config(file: Path | None, assignments: list[str], variables: Mapping[str, str]) -> ClusterConfig:
    """Settings of a cluster that joins the Ray of this job, if it runs as one; the model that ships if none is named.

    Raises ConfigError.
    """
    flags: dict[str, str] = {}
    known = {setting.key: setting.flag for setting in settings()}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or key not in known:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE, with a key of docs/configuration.md")
        flags[known[key]] = value
    config = load_config(file=file, variables=variables, flags=flags)
    if config.ray.address is None and RAY_ADDRESS in variables:
        config = config.model_copy(update={"ray": config.ray.model_copy(update={"address": "auto"})})
    if config.model is None:
        name = config.served_model_name or SHIPPED_MODEL_NAME
        config = config.model_copy(update={"model": str(shipped_model_dir()), "served_model_name": name})
    configure_logging(level=config.log_level, as_json=config.log_json)
    return config


@contextlib.asynccontextmanager
async def cluster_url(
    url: str | None, config: Callable[[], ClusterConfig], *, say: Callable[[str], None]
) -> AsyncGenerator[str]:
    """The address of the router. A cluster of its own listens on ports that nobody uses, and ends with the block.

    Raises UnavailableError if there is no cluster, or it is not ready.
    """
    if url is not None:
        await _check_ready(url)
        yield url.rstrip("/")
        return
    own = config()
    if own.log_level == "info":  # a line for each request would hide the job's own
        own = own.model_copy(update={"log_level": "warning"})
    own = with_free_ports(own, search_from=SEARCH_FROM + os.getpid() % 800 * 10)
    async with running_cluster(own, say=say) as cluster:
        yield cluster.http_url


async def _check_ready(url: str) -> None:
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"{url.rstrip('/')}/readyz", timeout=10.0)
    except httpx.HTTPError as error:
        raise UnavailableError(f"--url {url}: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        raise UnavailableError(f"--url {url} is not ready: {answer.text}")


def run_job(work: Callable[[], Awaitable[int]], console: Console) -> None:
    """Run a job to its exit code. SIGTERM, which is how Ray stops one, cancels it: what it has started is stopped."""

    async def guarded() -> int:
        task = asyncio.ensure_future(work())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        code = asyncio.run(guarded())
    except ConfigError as error:
        console.print(f"whalepod: {error}")
        code = 2
    except (ServingError, OSError) as error:
        console.print(f"whalepod: {error}")
        code = 1
    except asyncio.CancelledError:
        console.print("stopped")
        code = 1
    sys.exit(code)
