"""Rows of the failure table (`kvstore.md` §8) by their names, against a real server; `docs/kvstore.md` says where the
others are."""

from __future__ import annotations

import threading
from dataclasses import replace
from random import Random

import pytest

from tests.kvstore.conftest import OpenClient, StartServer
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.test_store_faults import LATE_S, fetch, seconds_of, until
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import Incarnation, RequestId
from whalepod.kvstore.caretaker import Caretaker
from whalepod.kvstore.client import BlockToPut, KvClient
from whalepod.kvstore.fault_check import check_schedule
from whalepod.kvstore.faulty_transport import Fault, FaultSchedule, FaultyTransport, VirtualClock
from whalepod.kvstore.server_check import parse_info
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.store_keys import block_store_key, handoff_snapshot_key
from whalepod.kvstore.value_format import PartKind, SnapshotValue

HANDOFF = handoff_snapshot_key(RequestId(b"r" * 16), 1)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault is not Fault.NONE], ids=lambda fault: fault.value)
def test_f2_f3_f5_f12_f15_f17_no_fault_by_itself_gives_a_wrong_byte_or_a_late_answer(fault: Fault) -> None:
    for seed in range(3):
        report = check_schedule(FaultSchedule(seed=seed, rates={fault: 0.2}))
        assert (report.wrong, report.late) == (0, 0)


def test_f3_a_slow_store_gives_what_has_arrived_without_a_gap_at_the_deadline() -> None:
    clock = VirtualClock()
    slow = FaultSchedule(seed=3, rates={Fault.DELAY: 1.0}, delay_s_max=0.02)
    client = KvClient(
        StoreSettings(),
        namespace=NAMESPACE,
        layout=LAYOUT,
        incarnation=Incarnation(1),
        clock=clock,
        transport=FaultyTransport(slow, clock),
    )
    keys = chain(64)
    assert client.put_blocks(to_put(keys), deadline=soon(100)) == 64
    deadline = replace(soon(0), at_s=clock.now_s + 0.2, clock=clock)
    into = buffers(64)
    count = client.fetch_blocks(keys, into, deadline=deadline).count
    assert 5 < count < 60
    assert [bytes(buffer) for buffer in into[:count]] == [payload_of(key) for key in keys[:count]]
    assert clock.now_s <= deadline.at_s + LATE_S
    client.close()


def test_f3_the_estimate_of_a_stores_speed_follows_its_reads(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(64)
    client.put_blocks(to_put(keys), deadline=soon())
    shard = client._transport.shards[0]
    assert shard.read_bytes_per_s is None
    fetch(client, keys)
    assert shard.read_bytes_per_s is not None
    assert shard.read_bytes_per_s > 1e6


def test_f15_a_missing_block_is_not_asked_for_again_for_a_second_unless_somebody_says_it_is_there(
    server: RedisServer, open_client: OpenClient
) -> None:
    client, other = open_client(server.address), open_client(server.address, incarnation=2)
    keys = chain(4)
    assert fetch(client, keys) == 0
    other.put_blocks(to_put(keys), deadline=soon())
    assert fetch(client, keys) == 0
    assert client.fetch_blocks(keys, buffers(4), deadline=soon(), handed_off_by="").count == 4
    assert until(lambda: fetch(client, keys) == 4, within_s=2)


def test_f15_a_block_that_this_process_stores_is_missing_no_longer(
    server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(server.address, missing_life_s=60.0)
    keys = chain(4)
    assert fetch(client, keys) == 0
    client.put_blocks(to_put(keys), deadline=soon())
    assert fetch(client, keys) == 4


def test_f17_a_server_with_too_many_wrong_values_is_bypassed(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, missing_life_s=0.0)
    for number in range(4):
        assert client.healthy
        keys = chain(2, salt=bytes([number]))
        client.put_blocks(to_put(keys), deadline=soon())
        server.call("SETRANGE", block_store_key(keys[0]), 1000, b"\0wrong\0")
        assert fetch(client, keys) == 0
    assert not client.healthy
    assert seconds_of(lambda: fetch(client, chain(2))) < 0.05
    assert client.put_blocks(to_put(chain(2)), deadline=soon()) == 0


def test_f24_two_writers_of_one_block_leave_one_whole_value(server: RedisServer, open_client: OpenClient) -> None:
    keys = chain(48)
    clients = [open_client(server.address, incarnation=number) for number in (1, 2)]
    counts: list[int] = []
    threads = [
        threading.Thread(
            target=lambda client=client, writer=writer: counts.append(
                client.put_blocks(to_put(keys, writer=writer), deadline=soon())
            )
        )
        for writer, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [48, 48]
    into = buffers(48)
    assert clients[0].fetch_blocks(keys, into, deadline=soon()).count == 48
    for key, buffer in zip(keys, into, strict=True):
        assert bytes(buffer) in (payload_of(key, writer=0), payload_of(key, writer=1))


def test_f28_what_a_revoked_writer_has_stored_can_be_removed(server: RedisServer, open_client: OpenClient) -> None:
    poisoner, honest = open_client(server.address, incarnation=66), open_client(server.address, incarnation=2)
    poisoner.put_blocks(to_put(chain(5, salt=b"p"), writer=9), deadline=soon())
    honest.put_blocks(to_put(chain(5, salt=b"h")), deadline=soon())
    care = Caretaker([server.address], name="test", quota_bytes=None, clock=SYSTEM_CLOCK)
    assert care.purge(lambda block: block.writer == 66) == 5
    care.close()
    assert fetch(honest, chain(5, salt=b"h")) == 5


def test_f32_fragmentation_is_told() -> None:
    info = parse_info(b"# Memory\r\nused_memory:100\r\nmaxmemory:200\r\nmem_fragmentation_ratio:1.62\r\nstrange\r\n")
    assert (info.memory_bytes_used, info.memory_bytes_max, info.fragmentation) == (100, 200, 1.62)


def test_f33_many_readers_of_one_block_cost_one_read_at_a_time(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, data_connections=4)
    keys = chain(16)
    client.put_blocks(to_put(keys), deadline=soon())
    before = server.call("INFO", "commandstats")["cmdstat_get"]["calls"] if _gets(server) else 0
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(fetch(client, keys))) for _ in range(12)]
    server.call("CLIENT", "PAUSE", "150")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [16] * 12
    assert _gets(server) - before < 12 * 16


def _gets(server: RedisServer) -> int:
    return server.call("INFO", "commandstats").get("cmdstat_get", {}).get("calls", 0)


def test_f34_a_full_store_takes_no_hand_off_and_says_so(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    client = open_client(server.address)
    big = SnapshotValue(boundary_tokens=1, mode=1, parts={PartKind.WINDOW_ROWS: bytes(2 << 20)})
    for size, value in enumerate((big, snapshot())):
        keys = (handoff_snapshot_key(RequestId(bytes([size]) * 16), number) for number in range(400))
        assert any(not client.put_snapshot(key, value, ttl_s=60, deadline=soon()) for key in keys)
    assert client.healthy


def test_f35_a_value_above_the_limit_is_refused_before_it_is_sent(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, value_bytes_max=8 << 20)
    huge = SnapshotValue(boundary_tokens=1, mode=1, parts={PartKind.WINDOW_ROWS: bytes(9 << 20)})
    with pytest.raises(ValueError, match="value_bytes_max"):
        client.put_snapshot(HANDOFF, huge, ttl_s=60, deadline=soon())
    assert server.call("DBSIZE") == 0


def test_f36_a_store_that_restarts_empty_is_a_cold_cache(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server()
    client = open_client(server.address, missing_life_s=0.0)
    keys = chain(32)
    client.put_blocks(to_put(keys), deadline=soon())
    server.kill()
    server.start()
    assert until(lambda: client.healthy, within_s=3)
    assert fetch(client, keys) == 0
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 32, within_s=2)
    assert fetch(client, keys) == 32


def open_and_abandon(client: KvClient, hand_offs: int, deadline: Deadline) -> None:
    draw = Random(1)
    small = SnapshotValue(boundary_tokens=1, mode=1, parts={PartKind.STATE: b"state"})
    for number in range(hand_offs):
        key = handoff_snapshot_key(RequestId(draw.randbytes(16)), number % 5)
        assert client.put_snapshot(key, small, ttl_s=600, deadline=deadline)
        client.unlink([key], deadline=deadline)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f22_a_million_hand_offs_that_are_opened_and_abandoned_leave_nothing() -> None:
    clock = VirtualClock()
    fake = FaultyTransport(FaultSchedule(seed=1, rates={}), clock)
    client = KvClient(
        StoreSettings(), namespace=NAMESPACE, layout=LAYOUT, incarnation=Incarnation(1), clock=clock, transport=fake
    )
    open_and_abandon(client, 1_000_000, Deadline.after(1e9, clock))
    assert (fake.bytes, fake.steps) == (0, 2_000_000)
    client.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f22_ten_thousand_hand_offs_that_are_opened_and_abandoned_leave_nothing_in_redis(
    server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(server.address)
    assert until(lambda: client.healthy, within_s=5)
    open_and_abandon(client, 10_000, soon(600))
    assert server.call("DBSIZE") == 0


@pytest.mark.slow
def test_f15_blocks_evicted_between_lookup_and_fetch_on_a_real_server_never_give_a_wrong_byte(
    server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(server.address, missing_life_s=0.0)
    draw, keys = Random(9), chain(48)
    for _ in range(200):
        client.put_blocks([BlockToPut(key, payload_of(key), exact=True) for key in keys], deadline=soon())
        assert client.lookup(keys, deadline=soon()) == 48
        lost = draw.sample(range(48), draw.randint(1, 6))
        server.call("DEL", *(block_store_key(keys[index]) for index in lost))
        assert fetch(client, keys) == min(lost)
