"""`VisionService`: an image in, the rows of its span out. Held, stored, or encoded; once for all who ask at a time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import NoReturn

import grpc
import torch
from prometheus_client import Counter, Histogram
from torch import Tensor

from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.vision_orders import VisionCaller
from whalepod.core.clock import Deadline
from whalepod.core.errors import CapacityError, DeadlineError, DrainingError, ServingError
from whalepod.core.tracing import span
from whalepod.engine.images import rows_name
from whalepod.engine.interface import RankLoad
from whalepod.engine.span_cache import SpanCache
from whalepod.engine.span_values import pack_rows, rows_of_value, span_value
from whalepod.engine.state_store import StateStore
from whalepod.kvstore.store_keys import span_key
from whalepod.model.config import VisionConfig
from whalepod.model.vision.grid import ImageGrid
from whalepod.model.vision.pixels import patches_of_bytes
from whalepod.model.vision.preparation import content_hash
from whalepod.rpc.vision.v1 import vision_pb2, vision_pb2_grpc

from .batcher import Batcher

STORE_S_MAX = 1.0
THREADS = 64
"""Calls at work at a time: each has one while it waits for its rows."""

IMAGES = Counter(
    "whalepod_vision_images", "Images asked for, by where their rows were: held, stored, encoded, failed.", ["source"]
)
FORGOTTEN = Counter("whalepod_vision_forgotten", "Images whose rows gave way to others.")
CALL_SECONDS = Histogram(
    "whalepod_vision_seconds",
    "From an image's arrival to its rows.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


@dataclass(frozen=True, slots=True)
class VisionParts:
    """What the service is made of."""

    config: VisionConfig
    width: int
    """D of the text network."""
    dtype: torch.dtype
    batcher: Batcher
    store: StateStore | None
    store_s: float
    caller: VisionCaller
    cache_rows: int
    calls_max: int
    """That wait or are at work; more are refused."""


class VisionServicer(vision_pb2_grpc.VisionServiceServicer):
    name = vision_pb2.DESCRIPTOR.services_by_name["VisionService"].full_name

    def __init__(self, parts: VisionParts) -> None:
        self._parts = parts
        self._cache = SpanCache(parts.cache_rows, on_forget=FORGOTTEN.inc)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="vision-call")
        self._draining = False
        self.requests_live = 0

    def register(self, server: grpc.aio.Server) -> None:
        vision_pb2_grpc.add_VisionServiceServicer_to_server(self, server)

    def start_draining(self) -> None:
        """Refuse new images from now on."""
        self._draining = True

    def load(self) -> RankLoad:
        batcher = self._parts.batcher
        return RankLoad(running=batcher.running, waiting=batcher.waiting, slots_total=THREADS)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def Encode(  # noqa: N802  the RPC's name
        self,
        request: vision_pb2.EncodeRequest,
        context: grpc.aio.ServicerContext[vision_pb2.EncodeRequest, vision_pb2.EncodeResponse],
    ) -> vision_pb2.EncodeResponse:
        self.requests_live += 1
        try:
            order = self._parts.caller.verified(request)
            if self._draining:
                raise DrainingError("this vision rank is draining")
            if self.requests_live > self._parts.calls_max:
                raise CapacityError(f"this rank's queue is full ({self._parts.calls_max} images)")
            deadline = Deadline.after(context.time_remaining() or 0.0, self._parts.caller.clock)
            with CALL_SECONDS.time(), span("encode", order.traceparent, image_bytes=len(order.data)):
                return await asyncio.get_running_loop().run_in_executor(
                    self._threads, lambda: self._encode(order, deadline)
                )
        except ServingError as error:
            IMAGES.labels("failed").inc()
            await _abort(context, error)
        finally:
            self.requests_live -= 1

    def _encode(self, order: vision_pb2.EncodeOrder, deadline: Deadline) -> vision_pb2.EncodeResponse:
        """On a thread of its own."""
        name = rows_name(content_hash(order.data, order.width, order.height), salt=order.salt)
        found = ["held"]

        def make() -> Tensor:
            rows, found[0] = self._stored_or_encoded(order, name, deadline)
            return rows

        rows = self._cache.rows(name, make, deadline=deadline)
        IMAGES.labels(found[0]).inc()
        return vision_pb2.EncodeResponse(
            rows=pack_rows(rows) if order.wants_rows else b"", tokens=len(rows), encoded=found[0] == "encoded"
        )

    def _stored_or_encoded(self, order: vision_pb2.EncodeOrder, name: bytes, deadline: Deadline) -> tuple[Tensor, str]:
        """[tokens, D] on the host, and which it was. Raises InvalidFieldError on bytes that are no image."""
        parts, key = self._parts, span_key(name)
        if parts.store is not None:
            tokens = ImageGrid.fit(max(1, order.width), max(1, order.height), parts.config).tokens
            value = parts.store.get_snapshot(key, deadline=deadline.earlier(STORE_S_MAX))
            rows = rows_of_value(value, tokens=tokens, width=parts.width, dtype=parts.dtype)
            if rows is not None:
                return rows, "stored"
        coming = parts.batcher.submit(patches_of_bytes(order.data, parts.config), deadline=deadline)
        try:
            rows = coming.result(deadline.remaining_s()).cpu()
        except FutureTimeoutError:
            raise DeadlineError("the call's deadline passed before its image was encoded") from None
        if parts.store is not None:
            wait = Deadline.after(STORE_S_MAX, parts.caller.clock)
            parts.store.put_snapshot(key, span_value(rows, owner=order.owner), ttl_s=parts.store_s, deadline=wait)
        return rows, "encoded"


async def _abort(
    context: grpc.aio.ServicerContext[vision_pb2.EncodeRequest, vision_pb2.EncodeResponse], error: ServingError
) -> NoReturn:
    status, message, metadata = status_of_error(error)
    await context.abort(status, message, metadata)
