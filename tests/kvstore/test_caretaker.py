"""Counting, purging, quotas and eviction on a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from tests.kvstore.conftest import OpenClient, StartServer
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.test_store_faults import fetch, until
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, snapshot, soon, to_put
from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation, RequestId
from whalepod.kvstore.caretaker import HANDOFF_AGE_S_MAX, Caretaker, owned_by
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.faults import StoreFault
from whalepod.kvstore.node_cache import NodeCache
from whalepod.kvstore.purge_watch import EPOCH_KEY
from whalepod.kvstore.settings import RETENTION_S_MAX, StoreSettings
from whalepod.kvstore.store_keys import handoff_snapshot_key, owner_tag, span_key

ONE, OTHER = owner_tag("one"), owner_tag("other")


def caretaker(server: RedisServer, *, name: str = "test", quota_bytes: int | None = None) -> Caretaker:
    return Caretaker([server.address], name=name, quota_bytes=quota_bytes, clock=SYSTEM_CLOCK)


def put(client: KvClient, keys: list[BlockKey], owner: int) -> None:
    blocks = [replace(block, owner=owner) for block in to_put(keys)]
    # On a busy machine a first connection may take longer than anybody waits for it.
    assert until(lambda: client.put_blocks(blocks, deadline=soon()) == len(keys), within_s=5)


def test_stats_tell_who_has_how_much(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    put(client, chain(700, salt=b"1"), ONE)
    put(client, chain(3, salt=b"2"), OTHER)
    care = caretaker(server)
    for _ in range(2):
        stats = care.stats()
        size = LAYOUT.payload_bytes + 256
        assert (stats.blocks, stats.block_bytes) == (703, 703 * size)
        assert stats.owners == {ONE: 700 * size, OTHER: 3 * size}
    server.call("FLUSHALL")
    assert care.stats().blocks == 0
    care.close()


def test_f29_a_purge_removes_one_owners_blocks_and_no_others(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    put(client, chain(20, salt=b"1"), ONE)
    put(client, chain(5, salt=b"2"), OTHER)
    server.call("SET", b"b:{0}:strange", b"not a value of ours")
    care = caretaker(server)
    assert care.purge(owned_by([ONE])) == 20
    assert client.lookup(chain(20, salt=b"1"), deadline=soon()) == 0
    assert fetch(client, chain(5, salt=b"2")) == 5
    care.close()


def test_rows_of_images_are_counted_and_purged_like_blocks(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = {owner: span_key(bytes([name]) * 32) for name, owner in enumerate((ONE, OTHER))}
    for owner, key in keys.items():
        value = replace(snapshot(), draft_fingerprint=owner)
        assert until(lambda: client.put_snapshot(key, value, ttl_s=60, deadline=soon()), within_s=5)  # noqa: B023
    put(client, chain(3), OTHER)
    care = caretaker(server)
    stats = care.stats()
    assert (stats.blocks, stats.images) == (3, 2)
    assert stats.owners[ONE] == stats.image_bytes // 2 == stats.owners[OTHER] - stats.block_bytes
    assert care.purge(owned_by([ONE])) == 1
    assert client.get_snapshot(keys[ONE], deadline=soon()) is None
    assert client.get_snapshot(keys[OTHER], deadline=soon()) is not None
    care.close()


@pytest.mark.slow
def test_f29_a_purge_of_several_servers_reaches_the_copies_on_nodes_and_says_who_was_away(
    start_server: StartServer, tmp_path: Path
) -> None:
    servers = [start_server() for _ in range(2)]
    addresses = tuple(server.address for server in servers)
    size = LAYOUT.payload_bytes
    cache = NodeCache(tmp_path, namespace=NAMESPACE, payload_bytes=size, bytes_max=80 * size, clock=SYSTEM_CLOCK)
    settings = StoreSettings(addresses=addresses, missing_life_s=0.0)
    client = KvClient(settings, namespace=NAMESPACE, layout=LAYOUT, incarnation=Incarnation(1), cache=cache)
    for number in range(30):  # of one prompt in eight all four runs are on one server: where depends on their ports
        keys = chain(64, salt=bytes([number]))
        put(client, keys, ONE)
        if all(server.call("DBSIZE") for server in servers):
            break
        for server in servers:
            server.call("FLUSHALL")
    else:
        pytest.fail("nothing is ever stored on one of two servers")
    care = Caretaker(addresses, name="test", quota_bytes=None, clock=SYSTEM_CLOCK)
    assert care.purge(owned_by([ONE])) == 64
    assert until(lambda: fetch(client, keys) == 0, within_s=3)
    put(client, keys, ONE)
    servers[0].kill()
    with pytest.raises(StoreFault):
        care.purge(owned_by([ONE]))
    assert servers[1].call("KEYS", "b:*") == [EPOCH_KEY]
    assert until(lambda: fetch(client, keys) == 0, within_s=3)
    care.close()
    client.close()


def test_blocks_can_be_purged_by_writer_and_namespace(server: RedisServer, open_client: OpenClient) -> None:
    put(open_client(server.address, incarnation=5), chain(4, salt=b"1"), ONE)
    put(open_client(server.address, incarnation=6), chain(4, salt=b"2"), ONE)
    care = caretaker(server)
    assert care.purge(lambda block: block.writer == 5) == 4
    assert care.purge(lambda block: block.namespace == NAMESPACE) == 4
    care.close()


def test_who_is_over_quota_loses_the_ends_of_its_prefixes(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    size = LAYOUT.payload_bytes + 256
    keys = chain(12, salt=b"1")
    put(client, keys, ONE)
    put(client, chain(3, salt=b"2"), OTHER)
    care = caretaker(server, quota_bytes=10 * size)
    assert care.tend(evict=False) == 2
    assert care.tend(evict=False) == 0
    assert client.fetch_blocks(keys, buffers(12), deadline=soon()).count == 10
    assert fetch(client, chain(3, salt=b"2")) == 3
    care.close()


def test_an_almost_full_server_is_relieved_from_the_ends(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server("--maxmemory", "8mb", "--maxmemory-policy", "volatile-ttl")
    client = open_client(server.address)
    number = 0
    while server.call("INFO", "memory")["used_memory"] < 0.87 * 8 * 2**20:
        put(client, chain(16, salt=bytes([number])), ONE)
        number += 1
    care = caretaker(server)
    care._allowance[server.address] = 1000.0
    care._keys_allowed = lambda address, keys: 1000  # type: ignore[method-assign]
    assert care.tend(evict=False) == 0
    before = REGISTRY.get_sample_value("whalepod_kv_removed_total", {"reason": "evicted"}) or 0.0
    removed = care.tend(evict=True)
    assert removed > 0
    assert REGISTRY.get_sample_value("whalepod_kv_removed_total", {"reason": "evicted"}) == before + removed
    assert until(lambda: server.call("INFO", "memory")["used_memory"] < 0.84 * 8 * 2**20, within_s=2)
    held = [fetch(client, chain(16, salt=bytes([salt]))) for salt in range(number)]
    assert sum(held) == 16 * number - removed
    care.close()


def test_one_process_at_a_time_looks_after_a_server(server: RedisServer, open_client: OpenClient) -> None:
    put(open_client(server.address), chain(12), ONE)
    first, second = caretaker(server, name="first", quota_bytes=1), caretaker(server, name="second", quota_bytes=1)
    assert first.tend(evict=False) == 12
    put(open_client(server.address), chain(12, salt=b"2"), ONE)
    for care in (first, second):
        care._allowance[server.address] = 100.0
    assert second.tend(evict=False) == 0
    server.call("DEL", "{whalepod:evictor}")
    second._allowance[server.address] = 100.0
    assert second.tend(evict=False) > 0
    first.close()
    second.close()


def test_a_server_that_is_gone_is_said_to_be(start_server: StartServer) -> None:
    server = start_server()
    care = caretaker(server)
    server.kill()
    with pytest.raises(StoreFault):
        care.stats()
    server.start()
    assert care.stats().blocks == 0
    care.close()


def test_hand_offs_that_nobody_has_read_for_an_hour_are_removed(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    old, new = (handoff_snapshot_key(RequestId(bytes([number]) * 16), 1) for number in range(2))
    for key in (old, new):
        assert client.put_snapshot(key, snapshot(), ttl_s=RETENTION_S_MAX, deadline=soon())
    server.call("PEXPIRE", old, round(1000 * (RETENTION_S_MAX - HANDOFF_AGE_S_MAX - 5)))
    care = caretaker(server)
    care.tend(evict=False)
    assert (server.call("EXISTS", old), server.call("EXISTS", new)) == (0, 1)
    care.close()


def test_a_server_that_is_gone_does_not_keep_the_others_waiting(
    start_server: StartServer, open_client: OpenClient
) -> None:
    gone, here = start_server(), start_server()
    put(open_client(here.address), chain(12), ONE)
    care = Caretaker([gone.address, here.address], name="test", quota_bytes=1, clock=SYSTEM_CLOCK)
    gone.kill()
    with pytest.raises(StoreFault):
        care.tend(evict=False)
    assert care.removed == 12
    care.close()
