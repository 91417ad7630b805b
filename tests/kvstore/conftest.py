"""Servers and clients for the store's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kvstore.redis_server import RedisServer, redis_binaries
from tests.kvstore.values import LAYOUT, NAMESPACE
from whalepod.core.ids import Incarnation
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.settings import StoreAddress, StoreSettings

StartServer = Callable[..., RedisServer]
OpenClient = Callable[..., KvClient]


BINARIES = redis_binaries()


@pytest.fixture(scope="session", params=list(BINARIES.values()), ids=list(BINARIES))
def binary(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="session")
def shared_server(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    running = RedisServer(binary, tmp_path_factory.mktemp("redis")).start()
    yield running
    running.kill()


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """An empty server, for tests that leave it alive and as it was configured."""
    shared_server.call("FLUSHALL")
    return shared_server


@pytest.fixture
def start_server(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts servers that the test may do anything to."""
    started: list[RedisServer] = []

    def start(*options: str) -> RedisServer:
        started.append(RedisServer(binary, tmp_path_factory.mktemp("redis"), options).start())
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture
def open_client() -> Iterator[OpenClient]:
    """Opens clients of the test namespace; `settings` are `StoreSettings`' own, addresses come first."""
    opened: list[KvClient] = []

    def open_(*addresses: StoreAddress, incarnation: int = 1, **settings: float) -> KvClient:
        configured = StoreSettings(addresses=addresses, **settings)  # pyright: ignore[reportArgumentType] # test shorthand
        opened.append(KvClient(configured, namespace=NAMESPACE, layout=LAYOUT, incarnation=Incarnation(incarnation)))
        return opened[-1]

    yield open_
    for client in opened:
        client.close()
