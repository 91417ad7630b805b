"""The page at /dashboard, and what it is told each second: ranks, requests, rates, faults. Never a word of a prompt.

    GET /dashboard          one file, nothing from elsewhere; holds no data
    GET /dashboard/events   snapshots as server-sent events, for operators

A snapshot is made once a second for all who look, and only while somebody does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from importlib import resources
from typing import Any, Final

from prometheus_client.registry import Collector
from starlette.responses import Response

from whalepod import __version__
from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId
from whalepod.kvstore.server_check import ServerInfo

from . import router_metrics as metrics
from .dashboard_sources import DashboardSources
from .http_stream import EventStream, data_frame
from .rank_numbers import RankNumbers, RankNumbersReader
from .readiness import Readiness
from .request_record import open_requests

INTERVAL_S: Final = 1.0
STORE_INTERVAL_S: Final = 5.0
WATCHERS_MAX: Final = 32
REQUESTS_SHOWN: Final = 50
COUNTERS: Final[dict[str, Collector]] = {
    "requests": metrics.REQUESTS,
    "shed": metrics.SHED,
    "prompt_tokens": metrics.PROMPT_TOKENS,
    "cached_tokens": metrics.CACHED_TOKENS,
    "completion_tokens": metrics.COMPLETION_TOKENS,
    "handoffs": metrics.HANDOFFS,
    "retries": metrics.RETRIES,
    "streams_lost": metrics.STREAMS_LOST,
    "failovers": metrics.FAILOVERS,
    "streams_broken": metrics.STREAMS_BROKEN,
}
HISTOGRAMS: Final[dict[str, Collector]] = {
    "first_token": metrics.FIRST_TOKEN_SECONDS,
    "inter_token": metrics.INTER_TOKEN_SECONDS,
    "handoff_exposed": metrics.HANDOFF_EXPOSED_SECONDS,
    "failover": metrics.FAILOVER_SECONDS,
}
POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


class Dashboard:
    """For one event loop."""

    def __init__(self, readiness: Readiness, sources: DashboardSources, *, keys_known: bool) -> None:
        """`keys_known`: there are operators' keys, with which the page may change something."""
        self._readiness = readiness
        self._sources = sources
        self._keys_known = keys_known
        self._store: list[dict[str, Any]] = []
        self._store_read_s = float("-inf")
        self._front = readiness.front
        self._reader = RankNumbersReader(clock=self._front.clock)
        self._watchers = 0
        self._made_s = float("-inf")
        self._snapshot: dict[str, Any] = {}
        self._making = asyncio.Lock()

    def page(self) -> Response:
        html = resources.files("whalepod.services.router").joinpath("dashboard.html").read_bytes()
        headers = {"content-security-policy": POLICY, "x-frame-options": "DENY", "cache-control": "no-cache"}
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    async def events(self) -> EventStream:
        """Raises UnavailableError when too many look already."""
        if self._watchers >= WATCHERS_MAX:
            raise UnavailableError(f"{WATCHERS_MAX} dashboards are open at this router: close one")
        frames = self._frames()
        return EventStream(await anext(frames), frames)

    async def _frames(self) -> AsyncGenerator[bytes, None]:
        self._watchers += 1
        try:
            while not self._readiness.draining:
                yield data_frame(await self._current())
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._watchers -= 1
            if not self._watchers:
                await self._reader.close()

    async def _current(self) -> dict[str, Any]:
        async with self._making:
            now_s = self._front.clock.monotonic_s()
            if now_s - self._made_s >= INTERVAL_S / 2:
                ranks = await self._reader.read(self._front.table.ranks.values())
                await self._read_store(now_s)
                self._snapshot, self._made_s = self._make(ranks), now_s
            return self._snapshot

    async def _read_store(self, now_s: float) -> None:
        if now_s - self._store_read_s >= STORE_INTERVAL_S:
            self._store_read_s = now_s
            servers = await asyncio.to_thread(self._sources.store)
            self._store = [_server(address, info) for address, info in servers.items()]

    def _make(self, numbers: Mapping[RankId, RankNumbers]) -> dict[str, Any]:
        front, report = self._front, self._readiness.report()
        return {
            "time_unix_ms": front.clock.unix_ms(),
            "version": __version__,
            "process": self._sources.process,
            "model": front.model.name,
            "context_tokens_max": front.context_tokens_max,
            "fidelity_default": front.model.fidelity_default.value,
            "readiness": report.to_json(),
            "keys_known": self._keys_known,
            "settings": dict(self._sources.settings),
            "store": self._store,
            "running": front.admission.running,
            "waiting": front.admission.waiting,
            "ranks": [self._rank(name, numbers.get(name)) for name in sorted(front.table.ranks)],
            "requests": self._requests(),
            "counters": {name: _counts(counter) for name, counter in COUNTERS.items()},
            "histograms": {name: _buckets(histogram) for name, histogram in HISTOGRAMS.items()},
        }

    def _rank(self, name: RankId, numbers: RankNumbers | None) -> dict[str, Any]:
        info = self._front.table.ranks[name]
        load = info.load
        told = numbers or RankNumbers()
        return {
            "rank": info.rank_id,
            "role": info.role.value,
            "address": info.address,
            "draining": not self._front.table.takes_work(info),
            "leaving": info.draining,
            "running": load.running,
            "slots": load.slots_total,
            "waiting": load.waiting,
            "blocks_used": load.blocks_total - load.blocks_free,
            "blocks": load.blocks_total,
            "prompt_rows": load.prefill_tokens_queued,
            "version": info.version,
            "numbers": dict(told.numbers),
            "tokens_by_source": dict(told.tokens_by_source),
        }

    def _requests(self) -> list[dict[str, Any]]:
        """The oldest that are here."""
        listed = sorted(open_requests(), key=lambda record: -record.age_s)
        return [
            {
                "endpoint": record.endpoint,
                "state": record.state.stage.value,
                "age_s": round(record.age_s, 1),
                "tokens": record.state.tokens,
                "tenant": record.tenant,
            }
            for record in listed[:REQUESTS_SHOWN]
        ]


def _server(address: str, info: ServerInfo | None) -> dict[str, Any]:
    used, limit = (0, 0) if info is None else (info.memory_bytes_used, info.memory_bytes_max)
    return {"address": address, "answers": info is not None, "bytes_used": used, "bytes_max": limit}


def _counts(counter: Collector) -> dict[str, float]:
    """By the value of its last label; without labels, by the empty text."""
    counts: dict[str, float] = {}
    for sample in _samples(counter):
        if sample.name.endswith("_total"):
            label = list(sample.labels.values())[-1] if sample.labels else ""
            counts[label] = counts.get(label, 0.0) + sample.value
    return counts


def _buckets(histogram: Collector) -> list[tuple[str, float]]:
    """Upper bounds in seconds, and how many values lie at or below each."""
    return [(sample.labels["le"], sample.value) for sample in _samples(histogram) if sample.name.endswith("_bucket")]


def _samples(metric: Collector) -> Iterable[Any]:
    return (sample for family in metric.collect() for sample in family.samples)
