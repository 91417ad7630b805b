"""A few numbers that only ranks know, read from their metrics pages while somebody looks at the dashboard."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from whalepod.cluster.config import METRICS_PORT_OFFSET, join_address
from whalepod.cluster.registration import RankInfo
from whalepod.core.clock import Clock
from whalepod.core.ids import RankId

NAMES: Mapping[str, str] = {
    "whalepod_rank_dspark_verified_total": "drafts_verified",
    "whalepod_rank_dspark_accepted_total": "drafts_accepted",
    "whalepod_rank_generated_tokens_total": "tokens_generated",
    "whalepod_eplb_balancedness": "balancedness",
    "whalepod_expert_group_ranks": "group_ranks",
    "whalepod_rank_dspark_request_steps_total": "draft_steps",
    "whalepod_kv_node_cache_blocks_used": "node_cache_blocks_used",
    "whalepod_kv_node_cache_blocks": "node_cache_blocks",
}
SOURCES = "whalepod_kv_tokens_total"
_LINE = re.compile(r'^(whalepod_[a-z_]+)(?:\{(?:[a-z]+="([^"]*)")?[^}]*\})? (\S+)', re.MULTILINE)
TIMEOUT_S = 0.5
AT_A_TIME = 16
PAGE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """Of one rank, by the names of NAMES; and restored tokens by source."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    tokens_by_source: Mapping[str, float] = field(default_factory=dict)


class RankNumbersReader:
    """For one event loop. Reads each rank at most once in `interval_s`."""

    def __init__(self, *, clock: Clock, interval_s: float = 2.0) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._client: httpx.AsyncClient | None = None
        self._read_s = -interval_s
        self._known: dict[RankId, RankNumbers] = {}

    async def read(self, ranks: Iterable[RankInfo]) -> Mapping[RankId, RankNumbers]:
        """What the ranks told last. One that does not answer in time keeps nothing."""
        if self._clock.monotonic_s() - self._read_s < self._interval_s:
            return self._known
        self._read_s = self._clock.monotonic_s()
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        gate, listed = asyncio.Semaphore(AT_A_TIME), list(ranks)
        pages = await asyncio.gather(*(self._page(self._client, gate, rank.address) for rank in listed))
        self._known = {
            rank.rank_id: parse_numbers(page) for rank, page in zip(listed, pages, strict=True) if page is not None
        }
        return self._known

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _page(self, client: httpx.AsyncClient, gate: asyncio.Semaphore, address: str) -> str | None:
        async with gate:
            try:
                answer = await client.get(metrics_url(address))
            except (httpx.HTTPError, ValueError):
                return None
        return answer.text if answer.is_success and len(answer.content) <= PAGE_BYTES_MAX else None


def metrics_url(address: str) -> str:
    """Of a rank whose gRPC server is at `address`, host:port. Raises ValueError."""
    parts = urlsplit(f"//{address}")
    return f"http://{join_address(parts.hostname or '', (parts.port or 0) + METRICS_PORT_OFFSET)}/metrics"


def parse_numbers(page: str) -> RankNumbers:
    """Sums over labels, except sources, which stay apart. Total: what is strange is left out."""
    numbers: dict[str, float] = {}
    sources: dict[str, float] = {}
    for name, label, text in _LINE.findall(page):
        if name not in NAMES and name != SOURCES:
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        held, key = (sources, label) if name == SOURCES else (numbers, NAMES[name])
        held[key] = held.get(key, 0.0) + value
    return RankNumbers(numbers, sources)
