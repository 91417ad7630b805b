"""How a rank that computes text gets the rows of images.

held here ─▶ in the store ─▶ a vision rank, then another ─▶ encoded here, if this process can ─▶ a truthful error
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import Counter
from torch import Tensor

from whalepod.core.clock import Deadline
from whalepod.core.errors import (
    CapacityError,
    DeadlineError,
    RequestError,
    ServingError,
    UnavailableError,
    WorkerLostError,
)
from whalepod.engine.images import RequestImage
from whalepod.engine.inline_spans import InlineSpans
from whalepod.engine.rank_model import RankModel
from whalepod.engine.span_cache import SpanCache
from whalepod.engine.span_values import rows_of_value, span_value, unpack_rows
from whalepod.engine.state_store import StateStore
from whalepod.kvstore.store_keys import span_key
from whalepod.rpc.vision.v1 import vision_pb2, vision_pb2_grpc

from .error_codes import error_from_rpc
from .grpc_options import channel_options
from .peer_tls import PeerTls
from .vision_orders import VisionCaller, by_affinity

log = logging.getLogger(__name__)

ROWS_HELD_MAX = 16_384
STORE_S_MAX = 1.0
"""A store that is slower than this is no help."""
PROBE_EVERY_S = 2.0
"""While a vision rank is at work it is asked so often whether it still serves."""
PROBE_S = 2.0
FAILED_S = 10.0
"""So long a rank that failed is asked after the others."""

IMAGES = Counter(
    "whalepod_rank_images",
    "Images whose rows this rank fetched, by where they were: store, vision (a vision rank), inline, nowhere.",
    ["source"],
)
VISION_FAILURES = Counter("whalepod_rank_vision_failures", "Vision ranks that were asked in vain.")


@dataclass(frozen=True, slots=True)
class SpanOptions:
    store_s: float
    """How long rows that were encoded here are kept in the store."""
    timeout_s: float
    """What one vision rank may take."""


class RankSpans:
    """A SpanSource. Thread-safe."""

    def __init__(
        self,
        model: RankModel,
        options: SpanOptions,
        *,
        caller: VisionCaller,
        store: StateStore | None,
        inline: InlineSpans | None,
        tls: PeerTls | None = None,
    ) -> None:
        """`inline` None: this process encodes none."""
        self._tls = tls
        self._width = model.config.hidden_size
        self._dtype: torch.dtype = model.dtype
        self._options = options
        self._caller = caller
        self._store = store
        self._inline = inline
        self._cache = SpanCache(ROWS_HELD_MAX)
        self._channels: dict[tuple[str, object], grpc.Channel] = {}
        """By address, and the certificates that are shown there."""
        self._failed: dict[str, Deadline] = {}
        self._opening = threading.Lock()

    def rows(self, image: RequestImage, *, encoders: Sequence[str], deadline: Deadline) -> Tensor:
        """[tokens, D] on the host. Raises RequestError if the image is no good, UnavailableError, DeadlineError."""
        return self._cache.rows(image.rows_name, lambda: self._fetched(image, encoders, deadline), deadline=deadline)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _fetched(self, image: RequestImage, encoders: Sequence[str], deadline: Deadline) -> Tensor:
        stored = self._stored(image, deadline)
        if stored is not None:
            IMAGES.labels("store").inc()
            return stored
        failures: list[str] = []
        for address in sorted(by_affinity(encoders, image.content_hash), key=self._has_failed):
            if deadline.expired:
                raise DeadlineError("the request's deadline passed while an image was being encoded")
            try:
                rows = self._asked(address, image, deadline)
            except RequestError:
                raise
            except ServingError as error:
                VISION_FAILURES.inc()
                if not isinstance(error, CapacityError):
                    self._failed[address] = Deadline.after(FAILED_S, self._caller.clock)
                failures.append(f"{address}: {error}")
                log.warning("a vision rank did not encode an image: %s", failures[-1])
                continue
            IMAGES.labels("vision").inc()
            return rows
        if self._inline is None:
            IMAGES.labels("nowhere").inc()
            asked = "; ".join(failures) or "there is none"
            raise UnavailableError(f"no vision rank could encode an image ({asked})")
        rows = self._inline.rows(image, encoders=(), deadline=deadline)
        IMAGES.labels("inline").inc()
        self._keep(image, rows)
        return rows

    def _asked(self, address: str, image: RequestImage, deadline: Deadline) -> Tensor:
        """Raises what the rank answers, WorkerLostError if it does not, or does not even say that it serves."""
        seconds = min(deadline.remaining_s(), self._options.timeout_s)
        stub: Any = vision_pb2_grpc.VisionServiceStub(self._channel(address))
        request = self._caller.request(image, seconds=seconds, wants_rows=True)
        try:
            answer = self._patiently(stub.Encode.future(request, timeout=seconds), address)
        except grpc.RpcError as failure:
            raise error_from_rpc(failure) from failure
        rows = unpack_rows(answer.rows, tokens=image.tokens, width=self._width, dtype=self._dtype)
        if rows is None:
            raise UnavailableError(f"{address} answered {len(answer.rows)} bytes that are no {image.tokens} rows")
        return rows

    def _patiently(self, call: grpc.Future[vision_pb2.EncodeResponse], address: str) -> vision_pb2.EncodeResponse:
        """What the call ends with. A rank that is stopped keeps its connections, and would otherwise cost its whole
        time."""
        while True:
            try:
                return call.result(PROBE_EVERY_S)
            except grpc.FutureTimeoutError:
                if not self._serves(address):
                    call.cancel()
                    raise WorkerLostError("the rank is silent") from None

    def _serves(self, address: str) -> bool:
        """Or says anything else."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel(address))
        try:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_S)
        except grpc.RpcError as failure:
            return failure.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
        return True

    def _has_failed(self, address: str) -> bool:
        """Lately."""
        failed = self._failed.get(address)
        return failed is not None and not failed.expired

    def _stored(self, image: RequestImage, deadline: Deadline) -> Tensor | None:
        if self._store is None:
            return None
        value = self._store.get_snapshot(span_key(image.rows_name), deadline=deadline.earlier(STORE_S_MAX))
        return rows_of_value(value, tokens=image.tokens, width=self._width, dtype=self._dtype)

    def _keep(self, image: RequestImage, rows: Tensor) -> None:
        """For the rank that goes on with the request, and for the next one."""
        if self._store is not None:
            key, deadline = span_key(image.rows_name), Deadline.after(STORE_S_MAX, self._caller.clock)
            value = span_value(rows, owner=image.owner)
            self._store.put_snapshot(key, value, ttl_s=self._options.store_s, deadline=deadline)

    def _channel(self, address: str) -> grpc.Channel:
        key = (address, None if self._tls is None else self._tls.version)
        with self._opening:
            if key not in self._channels:
                self._channels[key] = (
                    grpc.insecure_channel(address, options=channel_options())
                    if self._tls is None
                    else self._tls.blocking_channel(address)
                )
            return self._channels[key]
