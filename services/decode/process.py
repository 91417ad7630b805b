"""One decode rank as a process of its own, or as a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.rank_process import run_rank
from whalepod.cluster.rank_server import rank_identity
from whalepod.cluster.registration import RankInfo, RankRole

from .servicer import DecodeServicer


async def run_decode_rank(
    config: ClusterConfig, index: int, *, stop: asyncio.Event, on_ready: Callable[[RankInfo], None] | None = None
) -> None:
    """Serve as decode rank `index` until `stop` is set and its requests have ended. Raises as `run_rank` does."""
    identity = rank_identity(config, RankRole.DECODE, index)
    await run_rank(config, identity, DecodeServicer, stop=stop, on_ready=on_ready)
