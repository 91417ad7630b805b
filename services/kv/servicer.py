"""`KvService`: looks after the stored blocks. Translates, asks the caretaker on its own thread, and translates back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import grpc
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.purge_epochs import note_removed, raise_epoch, unfinished_purges
from whalepod.core.clock import Clock
from whalepod.core.errors import InvalidFieldError, ServingError, UnavailableError
from whalepod.kvstore.caretaker import Caretaker, owned_by
from whalepod.kvstore.faults import StoreFault
from whalepod.kvstore.store_keys import owner_tag
from whalepod.kvstore.survey import StoredBlock
from whalepod.rpc.kv.v1 import kv_pb2, kv_pb2_grpc

log = logging.getLogger(__name__)

TEND_EVERY_S = 2.0
SHOW_EVERY_S = 60.0
"""It looks at every block."""
NAMESPACE_BYTES = 16

T = TypeVar("T")

_Context = (
    grpc.aio.ServicerContext[kv_pb2.GetStatsRequest, kv_pb2.GetStatsResponse]
    | grpc.aio.ServicerContext[kv_pb2.PurgeRequest, kv_pb2.PurgeResponse]
)


class KvServicer(kv_pb2_grpc.KvServiceServicer):
    """For one event loop. The caretaker is only ever used on one thread."""

    name = kv_pb2.DESCRIPTOR.services_by_name["KvService"].full_name

    def __init__(self, caretaker: Caretaker, *, registry: aioredis.Redis, evict: bool, clock: Clock) -> None:
        """`registry`: where the epochs of purges are kept."""
        self._caretaker = caretaker
        self._registry = registry
        self._evict = evict
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-caretaker")

    async def GetStats(  # noqa: N802  the RPC's name
        self,
        request: kv_pb2.GetStatsRequest,
        context: grpc.aio.ServicerContext[kv_pb2.GetStatsRequest, kv_pb2.GetStatsResponse],
    ) -> kv_pb2.GetStatsResponse:
        del request
        try:
            stats = await self._run(self._caretaker.stats)
        except ServingError as error:
            await _abort(context, error)
        return kv_pb2.GetStatsResponse(
            blocks=stats.blocks,
            block_bytes=stats.block_bytes,
            images=stats.images,
            image_bytes=stats.image_bytes,
            snapshots=stats.snapshots,
            memory_bytes_used=stats.memory_bytes_used,
            memory_bytes_max=stats.memory_bytes_max,
            fragmentation=stats.fragmentation,
            blocks_evicted=self._caretaker.removed,
            owners=[kv_pb2.OwnerUsage(owner=owner, bytes=size) for owner, size in sorted(stats.owners.items())],
        )

    async def Purge(  # noqa: N802  the RPC's name
        self,
        request: kv_pb2.PurgeRequest,
        context: grpc.aio.ServicerContext[kv_pb2.PurgeRequest, kv_pb2.PurgeResponse],
    ) -> kv_pb2.PurgeResponse:
        try:
            doomed = doomed_by(request)
            if request.WhichOneof("scope") == "tenant":
                removed = await self._purge_tenant(request.tenant)
            else:
                removed = await self._run(lambda: self._caretaker.purge(doomed))
        except ServingError as error:
            await _abort(context, error)
        log.info("purged", extra={"scope": request.WhichOneof("scope"), "blocks": removed})
        return kv_pb2.PurgeResponse(keys_removed=removed)

    async def tend_forever(self) -> None:
        """Purges that routers were asked for, quotas and eviction, again and again. A store that does not answer is
        asked again."""
        shown_at_s = float("-inf")
        while True:
            try:
                await self._finish_purges()
                await self._run(lambda: self._caretaker.tend(evict=self._evict))
                if self._clock.monotonic_s() - shown_at_s >= SHOW_EVERY_S:
                    shown_at_s = self._clock.monotonic_s()
                    await self._run(self._caretaker.show)
            except UnavailableError as error:
                log.warning("the store cannot be looked after: %s", error)
            await asyncio.sleep(TEND_EVERY_S)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._caretaker.close()

    async def _run(self, work: Callable[[], T]) -> T:
        """Raises UnavailableError if a server does not answer."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except StoreFault as fault:
            raise UnavailableError(f"the store does not answer: {fault}") from None

    async def _purge_tenant(self, tenant: str) -> int:
        """Out of reach first: then nothing more is written where it would be found. Raises UnavailableError."""
        with _redis_asked():
            epoch = await raise_epoch(self._registry, tenant, self._clock.unix_ms())
        return await self._remove(tenant, epoch)

    async def _finish_purges(self) -> None:
        """Raises UnavailableError."""
        with _redis_asked():
            unfinished = await unfinished_purges(self._registry)
        for tenant, epoch in unfinished.items():
            log.info("purged", extra={"scope": "tenant", "blocks": await self._remove(tenant, epoch)})

    async def _remove(self, tenant: str, epoch: int) -> int:
        """How many blocks there were; what was written after `epoch` goes, too. Raises UnavailableError."""
        removed = await self._run(lambda: self._caretaker.purge(owned_by([owner_tag(tenant)])))
        with _redis_asked():
            await note_removed(self._registry, tenant, epoch)
        return removed


@contextmanager
def _redis_asked() -> Generator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise UnavailableError(f"the list of purges cannot be reached: {error or type(error).__name__}") from None


def doomed_by(request: kv_pb2.PurgeRequest) -> Callable[[StoredBlock], bool]:
    """Which blocks a purge is about. Raises InvalidFieldError if it does not say so properly."""
    match request.WhichOneof("scope"):
        case "tenant" if request.tenant:
            return owned_by([owner_tag(request.tenant)])
        case "namespace" if len(request.namespace) == NAMESPACE_BYTES:
            namespace = request.namespace
            return lambda block: block.namespace == namespace
        case "writer":
            writer = request.writer
            return lambda block: block.writer == writer
        case _:
            raise InvalidFieldError("scope", "a purge names a tenant, a namespace of 16 bytes, or a writer")


async def _abort(context: _Context, error: ServingError) -> NoReturn:
    status, message, metadata = status_of_error(error)
    await context.abort(status, message, metadata)
