"""Images that a rank is about to need are encoded while their text is on its way: the vision rank that it will ask has
begun by then, and both calls are one piece of work there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from whalepod.cluster.channels import Channels
from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.peer_tls import Dialler
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.vision_orders import VisionCaller, by_affinity
from whalepod.core.clock import Clock, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import WorkerLostError
from whalepod.core.tasks import cancel_and_wait
from whalepod.engine.images import RequestImage
from whalepod.rpc.vision.v1 import vision_pb2_grpc

from .prefill_client import LinkKey, link_key
from .router_metrics import VISION_AHEAD

log = logging.getLogger(__name__)

AHEAD_MAX = 16
"""Images of one attempt that are asked for at a time: who has many does not keep others waiting behind them all."""


class VisionAhead:
    """For one event loop. Nothing waits for it, and nothing depends on it: a rank asks for what it needs."""

    def __init__(
        self,
        *,
        secret: ClusterSecret,
        on_lost: Callable[[RankInfo], None],
        tls: Dialler | None = None,
        clock: Clock,
    ) -> None:
        self._secret = secret
        self._on_lost = on_lost
        self._clock = clock
        self._channels = Channels(tls)
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def asking(
        self, images: Sequence[RequestImage], ranks: Sequence[RankInfo], *, deadline: Deadline, traceparent: str
    ) -> AsyncGenerator[None]:
        """While the block runs, ask for each image once, in order, at the rank that everybody asks first for it. What
        has no answer at its end is no longer asked for."""
        if not images or not ranks:
            yield
            return
        task = asyncio.create_task(self._ask_all(images, ranks, deadline, traceparent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield
        finally:
            task.cancel()

    def close_links(self, *, keep: Collection[LinkKey]) -> None:
        """Close the channels to ranks that are not in `keep`, each once no call is using it."""
        self._channels.close_all_but(keep)

    async def close(self) -> None:
        await asyncio.gather(*(cancel_and_wait(task) for task in list(self._tasks)))
        await self._channels.close()

    async def _ask_all(
        self, images: Sequence[RequestImage], ranks: Sequence[RankInfo], deadline: Deadline, traceparent: str
    ) -> None:
        by_address = {rank.address: rank for rank in ranks}
        turns = asyncio.Semaphore(AHEAD_MAX)
        async with asyncio.TaskGroup() as group:
            for image in {image.content_hash: image for image in images}.values():
                await turns.acquire()
                rank = by_address[by_affinity(by_address, image.content_hash)[0]]
                one = group.create_task(self._ask(rank, image, deadline, traceparent))
                one.add_done_callback(lambda _: turns.release())

    async def _ask(self, rank: RankInfo, image: RequestImage, deadline: Deadline, traceparent: str) -> None:
        stub: Any = vision_pb2_grpc.VisionServiceStub(self._channels.to(rank.address, key=link_key(rank)))
        caller = VisionCaller(rank.model, rank.namespace, self._secret, self._clock)
        seconds = deadline.remaining_s()
        request = caller.request(image, seconds=seconds, wants_rows=False, traceparent=traceparent)
        try:
            answer = await stub.Encode(request, timeout=seconds)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            VISION_AHEAD.labels("failed").inc()
            log.warning("an image was not encoded ahead: %s", error, extra={"rank": rank.rank_id})
            if isinstance(error, WorkerLostError):
                self._on_lost(rank)
        else:
            VISION_AHEAD.labels("encoded" if answer.encoded else "known").inc()


def images_to_compute(
    images: Sequence[RequestImage], *, stored_tokens: int, prompt_tokens: int, kept_rows: int, window: int
) -> list[RequestImage]:
    """Those with rows that a rank will compute or replay, as far as the router knows. A hit beyond a span needs none
    of it, but for the rows that are replayed in front of the boundary."""
    boundary = min(stored_tokens, max(0, prompt_tokens - kept_rows))
    return [image for image in images if image.end > boundary - window]
