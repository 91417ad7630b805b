"""A real Redis for what talks to one, and ports nobody uses."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(EmbeddedRedisSettings(port=free_port(), memory_bytes=64 << 20)) as server:
        yield server
