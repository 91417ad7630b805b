"""A real Redis for ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings


@pytest.fixture
def redis_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with EmbeddedRedis(EmbeddedRedisSettings(port=port, memory_bytes=64 << 20)):
        yield port
