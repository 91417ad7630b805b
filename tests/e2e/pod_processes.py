"""A cluster as pods make one: Redis, a router, a prefill rank and a decode rank, each started by its own command.
There is no Ray in it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.own_ports import with_own_ports
from whalepod.cluster.child_process import SupervisedChild
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from whalepod.cluster.shipped_model import shipped_model_dir
from whalepod.core.clock import Deadline
from whalepod.core.ids import mint_cluster_secret

READY_S = 180.0


@contextlib.asynccontextmanager
async def pod_processes(directory: Path, settings: Mapping[str, Any]) -> AsyncGenerator[ClusterConfig]:
    """Settings of a cluster of the shipped model that is ready. Its processes end with the block."""
    config = with_own_ports(ClusterConfig.model_validate(settings))
    secret = directory / "secret"
    secret.touch(mode=0o600)
    secret.write_text(mint_cluster_secret(), encoding="utf-8")
    config = config.model_copy(
        update={
            "model": shipped_model_dir(),
            "secret_file": secret,
            "redis_url": f"redis://127.0.0.1:{config.redis_port}/0",
            "log_level": "warning",
        }
    )
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)), encoding="utf-8")
    redis = EmbeddedRedis(EmbeddedRedisSettings(port=config.redis_port, memory_bytes=2**28, directory=directory))
    await asyncio.to_thread(redis.start)
    children = [
        SupervisedChild(command, [sys.executable, "-m", "whalepod", command, "--config", str(file)])
        for command in ("router", "prefill", "decode")
    ]
    try:
        for child in children:
            await child.start()
        await _wait_ready(config, children)
        yield config
    finally:
        await asyncio.gather(*(child.stop(timeout_s=30) for child in children))
        await asyncio.to_thread(redis.stop)


async def _wait_ready(config: ClusterConfig, children: list[SupervisedChild]) -> None:
    deadline, said = Deadline.after(READY_S), "nothing"
    async with httpx.AsyncClient(trust_env=False) as client:
        while not deadline.expired:
            assert not (failures := [child.failure for child in children if child.failure]), failures
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(f"{config.operator_url}/readyz", timeout=2.0)
                said = answer.text
                pools = answer.json()["pools"] if answer.is_success else {}
                if all(pools.get(pool, {}).get("ranks") for pool in ("prefill", "decode")):
                    return
            await asyncio.sleep(0.1)
    raise AssertionError(f"not ready after {READY_S:g} s, the router says {said}")
