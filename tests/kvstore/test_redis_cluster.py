"""A Redis Cluster of three primaries and three replicas: hash tags by run, moved slots, and a fail-over under load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kvstore.conftest import BINARIES, OpenClient
from tests.kvstore.redis_cluster import RedisCluster, end_move, migrate, move_slot
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.test_store_faults import LATE_S, fetch, seconds_of, until
from tests.kvstore.values import LAYOUT, NAMESPACE, chain, soon, to_put
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation
from whalepod.kvstore.caretaker import Caretaker
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.node_cache import NodeCache
from whalepod.kvstore.purge_watch import EPOCH_KEY
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.slot_map import slot_of
from whalepod.kvstore.store_keys import block_store_key
from whalepod.kvstore.value_format import HEADER_BYTES

pytestmark = pytest.mark.slow


@pytest.fixture(params=list(BINARIES.values()), ids=list(BINARIES))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    running = RedisCluster(request.param, tmp_path_factory.mktemp("cluster"), size=3)
    yield running
    running.kill()


def test_runs_spread_over_the_primaries_and_are_found(cluster: RedisCluster, open_client: OpenClient) -> None:
    keys = chain(256)
    client = open_client(cluster.primaries[1].address, cluster=True)
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 256, within_s=5)
    assert client.lookup(keys, deadline=soon()) == 256
    assert fetch(client, keys) == 256
    assert all(primary.call("DBSIZE") > 0 for primary in cluster.primaries)
    assert fetch(open_client(*(node.address for node in cluster.nodes), cluster=True), keys) == 256


def test_f7_f8_blocks_are_found_in_every_moment_of_resharding(cluster: RedisCluster, open_client: OpenClient) -> None:
    """F7, F8: MOVED and ASK are followed, and a batch may lie on two nodes."""
    keys = chain(16)
    client = open_client(cluster.primaries[0].address, cluster=True, touch_interval_s=0.0, missing_life_s=0.0)
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 16, within_s=5)
    slot = slot_of(block_store_key(keys[0]))
    owner = slot * 3 // 16384
    source, target = cluster.primaries[owner], cluster.primaries[(owner + 1) % 3]
    ids = {"source_id": cluster.id_of(source), "target_id": cluster.id_of(target)}
    move_slot(slot, source=source, target=target, **ids)
    for key in keys:
        assert fetch(client, keys) == 16
        migrate(block_store_key(key), source=source, target=target)
    assert fetch(client, keys) == 16
    other = chain(20)
    assert client.put_blocks(to_put(other), deadline=soon()) == 20
    end_move(slot, nodes=cluster.primaries, target_id=ids["target_id"])
    assert fetch(client, keys) == 16
    assert client.lookup(keys, deadline=soon()) == 16


def test_f6_f13_a_dead_primary_costs_its_blocks_for_seconds_and_no_call_its_deadline(
    cluster: RedisCluster, open_client: OpenClient
) -> None:
    """F6, F13: a replica takes over, and is found without anybody being told."""
    keys = chain(256)
    client = open_client(cluster.primaries[0].address, cluster=True, missing_life_s=0.0)
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 256, within_s=5)
    assert until(lambda: sum(r.call("DBSIZE") for r in cluster.replicas) == 256, within_s=5)
    cluster.primaries[2].kill()
    late: list[float] = []

    def taken_over() -> bool:
        took = seconds_of(lambda: fetch(client, keys, seconds=0.3))
        if took > 0.3 + LATE_S:
            late.append(took)
        return cluster.replicas[2].call("INFO", "replication")["role"] == "master"

    def all_back() -> bool:
        return client.put_blocks(to_put(keys), deadline=soon(0.5)) == 256 and fetch(client, keys) == 256

    assert until(taken_over, within_s=60), "the servers' own affair: an election that fails is held again after 8 s"
    assert until(all_back, within_s=10)
    assert late == []


def test_quotas_and_eviction_reach_every_primary_of_a_cluster(cluster: RedisCluster, open_client: OpenClient) -> None:
    """One address is enough to find them, and the ends of prefixes go first although runs lie on different nodes."""
    size = LAYOUT.payload_bytes + HEADER_BYTES
    keys = chain(512)
    client = open_client(cluster.primaries[0].address, cluster=True, missing_life_s=0.0)
    assert until(
        lambda: client.put_blocks([replace(block, owner=7) for block in to_put(keys)], deadline=soon()) == 512,
        within_s=5,
    )
    care = Caretaker(
        [cluster.primaries[1].address], name="test", quota_bytes=60 * size, clock=SYSTEM_CLOCK, cluster=True
    )
    before = [len(blocks_of(primary)) for primary in cluster.primaries]
    assert care.stats().blocks == sum(before) == 512
    assert care.tend(evict=False) == sum(max(0, blocks - 60) for blocks in before) > 0
    assert care.tend(evict=False) == 0
    assert care.purge(lambda block: block.owner == 7) == sum(min(60, blocks) for blocks in before)
    assert client.put_blocks(to_put(keys), deadline=soon()) == 512
    full = cluster.primaries[slot_of(block_store_key(keys[0])) * 3 // 16384]
    used = full.call("INFO", "memory")["used_memory"]
    full.call("CONFIG", "SET", "maxmemory", round(used / 0.93))  # some of it goes by itself, with idle connections
    assert care.tend(evict=True) > 0
    assert fetch(client, keys) > 16, "a block with others behind it on another node goes last"
    care.close()
    rival = Caretaker([cluster.primaries[2].address], name="rival", quota_bytes=1, clock=SYSTEM_CLOCK, cluster=True)
    assert rival.tend(evict=False) == 0, "another looks after every one of them"
    rival.close()


def test_f29_a_purge_reaches_every_primary_and_then_the_copies_on_nodes(cluster: RedisCluster, tmp_path: Path) -> None:
    """Whichever primary has the slot of its epoch, and whichever nodes the purger and the reader were told of."""
    keys = chain(256)
    size = LAYOUT.payload_bytes
    cache = NodeCache(tmp_path, namespace=NAMESPACE, payload_bytes=size, bytes_max=300 * size, clock=SYSTEM_CLOCK)
    settings = StoreSettings(addresses=(cluster.primaries[0].address,), cluster=True, missing_life_s=0.0)
    client = KvClient(settings, namespace=NAMESPACE, layout=LAYOUT, incarnation=Incarnation(1), cache=cache)
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 256, within_s=5)
    care = Caretaker([cluster.primaries[1].address], name="test", quota_bytes=None, clock=SYSTEM_CLOCK, cluster=True)
    assert len([primary for primary in cluster.primaries if blocks_of(primary)]) == 3
    assert care.purge(lambda block: block.hash != keys[0].hash) == 255
    owner = cluster.primaries[slot_of(EPOCH_KEY) * 3 // 16384]
    assert owner.call("PTTL", EPOCH_KEY) == -1, "it is there for good"
    assert until(lambda: fetch(client, keys) == 1, within_s=3), "the cache still has them"
    care.close()
    client.close()


def blocks_of(primary: RedisServer) -> list[bytes]:
    return [key for key in primary.call("KEYS", "b:*") if b"purge" not in key]
