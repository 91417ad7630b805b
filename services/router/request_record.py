"""What is written about a request when it has ended: one log line, one count. Never a word of its text."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache
from typing import TypeVar
from weakref import WeakSet

from prometheus_client import Counter, Histogram

from whalepod.cluster.error_codes import kind_of_error
from whalepod.core.clock import Clock
from whalepod.core.errors import ServingError
from whalepod.core.tracing import start_span

from .admission import QueueFullError
from .job import Route
from .request_state import RequestState
from .router_metrics import REQUEST_SECONDS, REQUESTS
from .tenancy import Principal
from .usage import Usage
from .usage_log import UsageLog, UsageRecord

log = logging.getLogger(__name__)

T = TypeVar("T")

OK = "ok"
CLIENT_GONE = "cancelled"
INTERNAL = "internal"
UNAUTHENTICATED = "authentication"


@cache
def _requests(endpoint: str, outcome: str) -> Counter:
    return REQUESTS.labels(endpoint, outcome)


@cache
def _request_seconds(endpoint: str) -> Histogram:
    return REQUEST_SECONDS.labels(endpoint)


_OPEN: WeakSet[RequestRecord] = WeakSet()


def open_requests() -> list[RequestRecord]:
    """Those of this process that have not ended."""
    return list(_OPEN)


class RequestRecord:
    """Ends once: the first outcome counts."""

    def __init__(
        self,
        endpoint: str,
        request_id: str,
        *,
        clock: Clock,
        usage_log: UsageLog | None = None,
        traceparent: str = "",
    ) -> None:
        """`traceparent`: the client's. `request_id` is the client's too, or ours where it gave none: it is what both
        sides will search for."""
        self.endpoint = endpoint
        self.request_id = request_id
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._usage = Usage()
        self._usage_log = usage_log
        self._principal = Principal()
        self._route: Route | None = None
        self._ended = False
        self.state = RequestState()
        _OPEN.add(self)
        self._span = start_span(f"request {endpoint}", traceparent, serves=True, attributes={"request": request_id})

    @property
    def age_s(self) -> float:
        return self._clock.monotonic_s() - self._started_s

    @property
    def tenant(self) -> str:
        return self._principal.tenant

    @property
    def traceparent(self) -> str:
        """Of the whole request's span."""
        return self._span.traceparent

    def note_principal(self, principal: Principal) -> None:
        self._principal = principal

    def follow(self, state: RequestState) -> None:
        """Where the request stands is told there."""
        self.state = state

    def note_result(self, usage: Usage, route: Route | None) -> None:
        self._usage = usage
        self._route = route

    def end(self, outcome: str) -> None:
        if self._ended:
            return
        self._ended = True
        _OPEN.discard(self)
        seconds = self._clock.monotonic_s() - self._started_s
        _requests(self.endpoint, outcome).inc()
        _request_seconds(self.endpoint).observe(seconds)
        fields: dict[str, object] = {
            "request": self.request_id,
            "endpoint": self.endpoint,
            "tenant": self._principal.tenant,
            "outcome": outcome,
            "seconds": round(seconds, 4),
            "prompt_tokens": self._usage.prompt_tokens,
            "cached_tokens": self._usage.cached_tokens,
            "completion_tokens": self._usage.completion_tokens,
        }
        if self._route is not None:
            fields |= {
                "decode": self._route.decode_rank,
                "prefill": self._route.prefill_rank or "",
                "attempts": self._route.attempts,
            }
        log.info("request", extra=fields)
        self._end_span(outcome)
        if self._usage_log is not None and outcome != UNAUTHENTICATED:
            self._usage_log.write(
                UsageRecord(
                    time_unix_ms=self._clock.unix_ms(),
                    principal=self._principal,
                    endpoint=self.endpoint,
                    request_id=self.request_id,
                    outcome=outcome,
                    usage=self._usage,
                )
            )

    def _end_span(self, outcome: str) -> None:
        usage, span = self._usage, self._span
        span.set(
            tenant=self._principal.tenant,
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
        if outcome != OK:
            span.fail(outcome)
        span.end()

    def end_with_error(self, error: ServingError) -> None:
        self.end("queue_full" if isinstance(error, QueueFullError) else kind_of_error(error))


async def recorded(items: AsyncGenerator[T, None], record: RequestRecord) -> AsyncGenerator[T, None]:
    """`items`, with the record ended as they end: well, with an error, or because the reader went away."""
    try:
        async with aclosing(items):
            async for item in items:
                yield item
        record.end(OK)
    except ServingError as error:
        record.end_with_error(error)
        raise
    except Exception:
        record.end(INTERNAL)
        raise
    finally:
        record.end(CLIENT_GONE)
