"""Finding the servers to look after, with a Redis Cluster of one node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvstore.redis_server import CLUSTER_BUS_OFFSET, CLUSTER_PORTS, RedisServer, free_port
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.kvstore.faults import StoreFault
from whalepod.kvstore.settings import StoreAddress
from whalepod.kvstore.slot_map import SLOTS, slot_of
from whalepod.kvstore.store_servers import StoreServers

NOBODY = StoreAddress(host="127.0.0.1", port=1)
NAME = b"{whalepod:evictor}"


@pytest.fixture
def node(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    port = free_port(CLUSTER_PORTS, also_at=CLUSTER_BUS_OFFSET)
    running = RedisServer(binary, tmp_path_factory.mktemp("node"), ("--cluster-enabled", "yes"), port=port).start()
    running.call("CLUSTER", "ADDSLOTS", *range(SLOTS))
    yield running
    running.kill()


def test_servers_of_their_own_are_those_of_the_settings(server: RedisServer) -> None:
    servers = StoreServers([NOBODY, server.address], cluster=False, clock=SYSTEM_CLOCK)
    assert [admin.address for admin in servers.all()] == [NOBODY, server.address]
    assert servers.own_key(NAME, servers.all()[1]) == NAME
    servers.close()


def test_any_node_that_answers_tells_the_primaries(node: RedisServer) -> None:
    servers = StoreServers([NOBODY, node.address], cluster=True, clock=SYSTEM_CLOCK)
    (admin,) = servers.all()
    assert admin.address == node.address
    assert servers.own_key(NAME, admin) == b"{whalepod:evictor:0}"
    servers.close()


def test_a_lock_lies_on_the_server_that_it_is_for(node: RedisServer) -> None:
    first = slot_of(b"{whalepod:evictor:0}")
    node.call("CLUSTER", "DELSLOTS", first)
    servers = StoreServers([node.address], cluster=True, clock=SYSTEM_CLOCK)
    (admin,) = servers.all()
    key = servers.own_key(NAME, admin)
    assert key.startswith(b"{whalepod:evictor:")
    assert slot_of(key) != first
    servers.close()


def test_a_cluster_that_nobody_tells_of_is_a_fault(server: RedisServer) -> None:
    servers = StoreServers([NOBODY, server.address], cluster=True, clock=SYSTEM_CLOCK)
    with pytest.raises(StoreFault):
        servers.all()
    servers.close()
