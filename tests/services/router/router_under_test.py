"""A router over fake ranks: the real fronts and everything behind them, with only the engines made of formulas."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
from starlette.types import ASGIApp

from tests.services.router.fake_ranks import SECRET, FakeDecode, FakePrefill, FakeVision
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.tls import ServerTls
from whalepod.core.ids import Incarnation, RankId
from whalepod.kvstore.client import KvClient
from whalepod.model.config import ModelConfig
from whalepod.model.tiny_checkpoint import SMALLEST, shipped_tokenizer, tiny_config_json
from whalepod.services.router.app import HttpFront
from whalepod.services.router.authentication import Authenticator
from whalepod.services.router.cost_meter import CostMeter
from whalepod.services.router.front_door import FrontDoor
from whalepod.services.router.grpc_front import GrpcFront
from whalepod.services.router.http_server import http_server
from whalepod.services.router.language import Language
from whalepod.services.router.readiness import Readiness
from whalepod.services.router.router_parts import RouterParts, load_language
from whalepod.services.router.usage_log import UsageLog

FakeRank = FakeDecode | FakePrefill | FakeVision
LOOK_S = 0.005


class UnmeasuredCosts(CostMeter):
    """Learns nothing, so that a prompt's length alone decides where it is computed and no busy machine does."""

    def note_remote(self, seconds: float, *, tokens: int) -> None: ...

    def note_local(self, seconds: float, *, tokens: int) -> None: ...

    def note_handoff(self, seconds: float) -> None: ...


def write_model_files(directory: Path) -> Path:
    """What a router reads of a checkpoint: configuration and tokenizer, no weights."""
    tokenizer = shipped_tokenizer()
    config = tiny_config_json(tokenizer, block_tokens=16, **SMALLEST)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(tokenizer.json)
    return directory


@cache
def read_model(model_dir: Path) -> tuple[ModelConfig, Language]:
    """Once for all tests: reading the tokenizer is the slow part of starting a router."""
    return ModelConfig.from_dir(model_dir), load_language(router_config(model_dir))


class FakeDirectory:
    """Ranks by name. One that is reported lost comes back when its server is alive, as after a health check."""

    def __init__(self, ranks: Sequence[FakeRank]) -> None:
        self._ranks = {rank.server.rank_id: rank for rank in ranks}
        self._lost: dict[RankId, Incarnation] = {}
        self.on_change: Callable[[], None] = lambda: None

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        infos = {name: rank.server.info() for name, rank in self._ranks.items() if name not in self._lost}
        return MappingProxyType(infos)

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        rank = self._ranks.get(rank_id)
        if rank is not None and rank.server.info().incarnation == incarnation:
            self._lost[rank_id] = incarnation
            self.on_change()

    def remove(self, rank: FakeRank) -> None:
        self._ranks.pop(rank.server.rank_id, None)
        self.on_change()

    def look(self) -> None:
        """One round of health checks."""
        answering = [name for name in self._lost if name in self._ranks and self._ranks[name].server.alive]
        for name in answering:
            del self._lost[name]
        if answering:
            self.on_change()


@dataclass(slots=True)
class RouterUnderTest:
    front: FrontDoor
    readiness: Readiness
    directory: FakeDirectory
    http: httpx.AsyncClient
    http_port: int
    grpc_address: str

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/completions", json={"prompt": "Hello", "temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[str]:
        """The data of every event, in order."""
        events: list[str] = []
        async with self.http.stream("POST", path, json={"prompt": "Hello", "stream": True, **body}) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if line:
                    assert line.startswith("data: "), line
                    events.append(line.removeprefix("data: "))
        return events


def router_config(
    model_dir: Path, *, prefill_replicas: int = 1, context_tokens_max: int = 4096, **router: Any
) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "model": str(model_dir),
            "served_model_name": "whale",
            "secret": SECRET.key.decode(),
            "prefill": {"replicas": prefill_replicas},
            "engine": {"context_tokens_max": context_tokens_max},
            "router": {"queue_timeout_seconds": 5.0, "request_timeout_seconds": 20.0, **router},
        }
    )


@asynccontextmanager
async def running_router(
    model_dir: Path,
    ranks: Sequence[FakeRank],
    *,
    connect_store: Callable[[bytes], KvClient] | None = None,
    tls: PeerTls | None = None,
    other_processes: Sequence[str] = (),
    purge_epoch: Callable[[str], int] = lambda _: 0,
    **settings: Any,
) -> AsyncGenerator[RouterUnderTest, None]:
    """The router's app in this event loop; the ranks are started and stopped with it."""
    for rank in ranks:
        await rank.server.start()
    directory = FakeDirectory(ranks)
    config = router_config(model_dir, **settings)
    model_config, language = read_model(model_dir)
    parts = RouterParts(
        config,
        model_config,
        language,
        directory,
        connect_store=connect_store,
        purge_epoch=purge_epoch,
        tls=tls,
        meter=UnmeasuredCosts(),
    )
    directory.on_change = parts.ranks_changed
    readiness = Readiness(parts.front, needs_prefill=config.prefill.replicas > 0, registry_ok=lambda: True)
    authenticator = Authenticator.from_settings(config.router)
    usage_log = UsageLog(config.router.usage_file) if config.router.usage_file else None
    grpc_front = GrpcFront(parts.front, authenticator=authenticator, usage_log=usage_log)
    grpc_port = grpc_front.bind("127.0.0.1:0")
    await grpc_front.start()
    checks = asyncio.create_task(_check_forever(directory))
    try:
        front = HttpFront(
            parts.front,
            readiness,
            authenticator=authenticator,
            usage_log=usage_log,
            operator_hosts=config.router.operator_hosts,
            other_processes=other_processes,
        )
        async with serving(front.app()) as port:
            url = f"http://127.0.0.1:{port}"
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(
                base_url=url, timeout=30.0, trust_env=False, verify=False, limits=limits
            ) as http:
                yield RouterUnderTest(parts.front, readiness, directory, http, port, f"127.0.0.1:{grpc_port}")
    finally:
        checks.cancel()
        await grpc_front.stop(grace_s=0)
        await parts.close()
        if usage_log is not None:
            usage_log.close()
        for rank in ranks:
            await rank.server.kill()


@asynccontextmanager
async def serving(app: ASGIApp, *, tls: ServerTls | None = None) -> AsyncGenerator[int, None]:
    """The app behind a real HTTP server; yields its port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = http_server(app, tls=tls)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started)
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        await task
        listener.close()


async def _check_forever(directory: FakeDirectory) -> None:
    while True:
        await asyncio.sleep(0.05)
        directory.look()


async def until(condition: Callable[[], object], *, timeout_s: float = 5.0) -> None:
    """Returns when the condition holds; fails after `timeout_s` of this process. Router and ranks are all in it: where
    it waits for a processor, that is not their time."""
    for _ in range(int(timeout_s / LOOK_S)):
        if condition():
            return
        await asyncio.sleep(LOOK_S)
    assert condition(), f"not after {timeout_s:g} s"


async def answer_to(router: RouterUnderTest, prompt: Sequence[int], **body: Any) -> list[int]:
    answer = await router.complete(prompt=list(prompt), max_tokens=6, return_token_ids=True, **body)
    return answer["choices"][0]["token_ids"]


async def failure_of(router: RouterUnderTest, prompt: Sequence[int], **body: Any) -> tuple[int, str]:
    response = await router.http.post("/v1/completions", json={"prompt": list(prompt), "max_tokens": 6, **body})
    return response.status_code, response.json()["error"]["code"]


async def check_nothing_is_left(router: RouterUnderTest, *ranks: FakeRank) -> None:
    """Within a second no rank works for anybody and the router holds nothing."""
    for rank in ranks:
        assert not isinstance(rank, FakeVision)
        idle = (lambda r=rank: not r.live) if isinstance(rank, FakeDecode) else (lambda r=rank: r.running == 0)
        await until(idle, timeout_s=1.0)
    await until(lambda: router.front.admission.running == 0, timeout_s=1.0)
    for info in router.directory.ranks.values():
        candidate = router.front.table.candidate(info)
        assert (candidate.requests_here, candidate.prefill_tokens_here) == (0, 0)


@asynccontextmanager
async def stream_of(router: RouterUnderTest, **body: Any) -> AsyncGenerator[AsyncGenerator[str, None], None]:
    async with router.http.stream("POST", "/v1/completions", json={"stream": True, **body}) as response:
        assert response.status_code == 200, await response.aread()

        async def events() -> AsyncGenerator[str, None]:
            async for line in response.aiter_lines():
                if line:
                    yield line.removeprefix("data: ")

        yield events()
