"""One prefill rank as a process of its own, or as a Ray actor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.rank_process import run_rank
from whalepod.cluster.rank_server import rank_identity
from whalepod.cluster.registration import RankInfo

from .servicer import PrefillServicer


async def run_prefill_rank(
    config: ClusterConfig, index: int, *, stop: asyncio.Event, on_ready: Callable[[RankInfo], None] | None = None
) -> None:
    """Serve as prefill rank `index` until `stop` is set and its requests have ended. Raises as `run_rank` does."""
    identity = rank_identity(config, config.prefill_role(index), index)
    await run_rank(config, identity, PrefillServicer, stop=stop, on_ready=on_ready)
