"""A cluster can be moved to ports that nobody uses."""

from __future__ import annotations

import socket

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.free_ports import busy_ports, is_free, with_free_ports
from whalepod.cluster.pool_settings import DecodeSettings


def test_a_port_that_is_listened_on_is_busy_and_named_by_its_setting() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = int(server.getsockname()[1])
        assert not is_free(port)
        config = ClusterConfig(redis_port=port)
        assert busy_ports(config).get("redis_port") == port
    assert is_free(port)


def test_moved_ports_are_free_apart_and_consecutive_in_a_pool() -> None:
    config = with_free_ports(ClusterConfig(decode=DecodeSettings(replicas=3)), search_from=25_000)
    ports = config.ports()
    assert busy_ports(config) == {}
    assert len(set(ports.values())) == len(ports)
    assert min(ports.values()) >= 25_000
    assert [ports[f"decode.port + {index}"] for index in range(3)] == [config.decode.port + index for index in range(3)]


def test_a_busy_port_is_stepped_over() -> None:
    first = with_free_ports(ClusterConfig(), search_from=26_000)
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", first.decode.port))
        server.listen()
        second = with_free_ports(ClusterConfig(), search_from=26_000)
    assert first.decode.port not in second.ports().values()
