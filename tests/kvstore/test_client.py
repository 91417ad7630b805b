from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.kvstore.conftest import OpenClient, StartServer
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.test_store_faults import until
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.block_keys import RUN_BLOCKS, BlockKey
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import Incarnation, RequestId
from whalepod.kvstore import pipeline
from whalepod.kvstore.client import BlockToPut, Fetched, KvClient
from whalepod.kvstore.redis_shard import SPEED_LIFE_S, Shard
from whalepod.kvstore.redis_transport import RedisTransport
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import block_store_key, handoff_snapshot_key, turn_snapshot_key
from whalepod.kvstore.transport import ValueToWrite
from whalepod.kvstore.value_format import HEADER_BYTES, PartKind, payload_checksum, with_checksums

HANDOFF = handoff_snapshot_key(RequestId(b"r" * 16), 1)


def test_blocks_come_back_as_they_were_put(server: RedisServer, open_client: OpenClient) -> None:
    writer, reader = open_client(server.address), open_client(server.address, incarnation=2)
    keys = chain(40)
    assert writer.lookup(keys, deadline=soon()) == 0
    assert writer.put_blocks(to_put(keys), deadline=soon()) == 40
    assert reader.lookup(keys, deadline=soon()) == 40
    into = buffers(40)
    assert reader.fetch_blocks(keys, into, deadline=soon()) == Fetched(40, (True,) * 40)
    assert [bytes(buffer) for buffer in into] == [payload_of(key) for key in keys]


def test_a_unix_socket_serves_as_well(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.unix_address)
    keys = chain(3)
    assert client.put_blocks(to_put(keys), deadline=soon()) == 3
    assert client.fetch_blocks(keys, buffers(3), deadline=soon()).count == 3


def test_an_ipv6_literal_is_an_address(start_server: StartServer, open_client: OpenClient) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = start_server("--bind", "127.0.0.1", "::1")
    client = open_client(StoreAddress.parse(f"redis://[::1]:{server.port}"))
    assert client.put_blocks(to_put(chain(1)), deadline=soon()) == 1


def test_payloads_may_come_in_pieces_and_buffers_in_any_type(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    key = chain(1)[0]
    data = payload_of(key)
    pieces = [memoryview(data[:3000]), bytearray(data[3000:4500]), data[4500:]]
    assert client.put_blocks([BlockToPut(key, pieces, exact=False)], deadline=soon()) == 1
    wide = memoryview(bytearray(LAYOUT.payload_bytes)).cast("I", (LAYOUT.payload_bytes // 8, 2))
    assert client.fetch_blocks([key], [wide], deadline=soon()) == Fetched(1, (False,))
    assert wide.tobytes() == data


@pytest.mark.parametrize("held", [0, 1, 15, 16, 17, 64, 65, 90, 96, 100])
def test_a_lookup_finds_the_stored_prefix(server: RedisServer, open_client: OpenClient, held: int) -> None:
    client = open_client(server.address)
    keys = chain(100)
    client.put_blocks(to_put(keys[:held]), deadline=soon())
    assert client.lookup(keys, deadline=soon()) == held
    assert client.lookup(keys[:20], deadline=soon()) == min(held, 20)


def test_a_hole_ends_what_is_fetched(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(40)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("DEL", block_store_key(keys[21]))
    lost = _lost_tokens("hole")
    assert client.fetch_blocks(keys, buffers(40), deadline=soon()).count == 21
    assert client.lookup(keys, deadline=soon()) == 21
    assert _lost_tokens("hole") - lost == 18 * LAYOUT.block_tokens


def test_tokens_lost_to_a_deadline_are_counted_up_to_what_is_known_to_be_missing(
    server: RedisServer, open_client: OpenClient
) -> None:
    client, keys = open_client(server.address), chain(12)
    client.put_blocks(to_put(keys[:8]), deadline=soon())
    lost = _lost_tokens("deadline")
    assert client.fetch_blocks(keys, buffers(12), deadline=Deadline.after(0)).count == 0
    assert _lost_tokens("deadline") - lost == 12 * LAYOUT.block_tokens, "nobody knows what is stored"
    lost = _lost_tokens("deadline")
    assert client.fetch_blocks(keys, buffers(12), deadline=soon()).count == 8
    assert _lost_tokens("deadline") == lost, "a miss"
    assert client.fetch_blocks(keys, buffers(12), deadline=Deadline.after(0)).count == 0
    assert _lost_tokens("deadline") - lost == 8 * LAYOUT.block_tokens


def test_bytes_of_exchanges_are_told_by_direction(server: RedisServer, open_client: OpenClient) -> None:
    client, keys = open_client(server.address), chain(16)
    moved = {way: _sample("exchange_bytes_sum", dir=way) for way in ("read", "written")}
    counts = {way: _sample("exchange_bytes_count", dir=way) for way in ("read", "written")}
    client.put_blocks(to_put(keys), deadline=soon())
    client.fetch_blocks(keys, buffers(16), deadline=soon())
    for way in ("read", "written"):
        assert _sample("exchange_bytes_sum", dir=way) - moved[way] == 16 * (HEADER_BYTES + LAYOUT.payload_bytes)
        assert _sample("exchange_bytes_count", dir=way) - counts[way] == 1


def _lost_tokens(reason: str) -> float:
    return _sample("lost_tokens_sum", reason=reason)


def _sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"whalepod_kv_{name}", labels) or 0.0


def test_another_salt_finds_nothing(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    client.put_blocks(to_put(chain(4, salt=b"one")), deadline=soon())
    assert client.lookup(chain(4, salt=b"two"), deadline=soon()) == 0


def test_somebody_elses_block_counts_as_stored_and_stays(server: RedisServer, open_client: OpenClient) -> None:
    one, other = open_client(server.address), open_client(server.address, incarnation=2)
    keys = chain(4)
    one.put_blocks(to_put(keys, writer=1), deadline=soon())
    assert other.put_blocks(to_put(keys, writer=2), deadline=soon()) == 4
    into = buffers(4)
    other.fetch_blocks(keys, into, deadline=soon())
    assert [bytes(buffer) for buffer in into] == [payload_of(key, writer=1) for key in keys]


@pytest.mark.parametrize(("first", "second", "winner"), [(False, True, 2), (True, False, 1), (False, False, 1)])
def test_only_exact_replaces_approximate(
    server: RedisServer, open_client: OpenClient, first: bool, second: bool, winner: int
) -> None:
    one, other = open_client(server.address), open_client(server.address, incarnation=2)
    keys = chain(3)
    one.put_blocks(to_put(keys, exact=first, writer=1), deadline=soon())
    assert other.put_blocks(to_put(keys, exact=second, writer=2), deadline=soon()) == 3
    into = buffers(3)
    assert one.fetch_blocks(keys, into, deadline=soon()).exact == (first or second,) * 3
    assert [bytes(buffer) for buffer in into] == [payload_of(key, writer=winner) for key in keys]


def test_exact_only_stops_at_the_first_approximate_block(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(6)
    client.put_blocks([*to_put(keys[:4]), *to_put(keys[4:], exact=False)], deadline=soon())
    assert client.fetch_blocks(keys, buffers(6), deadline=soon(), exact_only=True) == Fetched(4, (True,) * 4)
    assert client.fetch_blocks(keys, buffers(6), deadline=soon()).count == 6


def test_deeper_blocks_expire_earlier_and_no_life_is_endless(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, retention_s=1000.0)
    keys = chain(30)
    client.put_blocks(to_put(keys), deadline=soon())
    lives = [server.call("PTTL", block_store_key(key)) for key in keys]
    assert all(900_000 < life <= 1_000_000 for life in lives)
    assert lives[0] - lives[29] == pytest.approx(29 * 50, abs=1000)
    client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    assert 50_000 < server.call("PTTL", HANDOFF) <= 60_000


@pytest.mark.parametrize("way", ["fetch", "put"])
def test_a_hit_renews_a_life_and_never_shortens_one(server: RedisServer, open_client: OpenClient, way: str) -> None:
    client, other = open_client(server.address), open_client(server.address, retention_s=4000.0)
    keys = chain(2)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("PEXPIRE", block_store_key(keys[0]), 500_000)
    if way == "fetch":
        assert other.fetch_blocks(keys, buffers(2), deadline=soon()).count == 2
    else:
        assert other.put_blocks(to_put(keys), deadline=soon()) == 2
    assert 3_900_000 < server.call("PTTL", block_store_key(keys[0])) <= 4_000_000
    assert server.call("PTTL", block_store_key(keys[1])) > 80_000_000


def test_a_touch_renews_blocks_that_were_used_from_elsewhere_once_in_its_interval(
    server: RedisServer, open_client: OpenClient
) -> None:
    client, other = open_client(server.address), open_client(server.address)
    keys = chain(20)
    client.put_blocks(to_put(keys[:19]), deadline=soon())

    def left(key: BlockKey) -> int:
        server.call("PEXPIRE", block_store_key(key), 1_000_000)
        assert other.touch(keys, deadline=soon())
        return server.call("PTTL", block_store_key(key))

    intervals = REGISTRY.get_sample_value("whalepod_kv_reuse_interval_seconds_count") or 0.0
    assert left(keys[17]) > 80_000_000
    assert left(keys[17]) <= 1_000_000, "it was renewed a moment ago"
    assert server.call("EXISTS", block_store_key(keys[19])) == 0
    assert REGISTRY.get_sample_value("whalepod_kv_reuse_interval_seconds_count") == intervals + 19


def test_a_probe_does_not_renew_a_life(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(1)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("PEXPIRE", block_store_key(keys[0]), 5000)
    client.lookup(keys, deadline=soon())
    assert server.call("PTTL", block_store_key(keys[0])) <= 5000


def test_a_snapshot_comes_back_once_if_it_is_unlinked(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    assert client.get_snapshot(HANDOFF, deadline=soon()) is None
    assert client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    found = client.get_snapshot(HANDOFF, deadline=soon(), unlink=True)
    assert found is not None
    assert replace(found, parts={kind: bytes(data) for kind, data in found.parts.items()}) == replace(
        snapshot(), parts=dict(sorted(snapshot().parts.items()))
    )
    assert client.get_snapshot(HANDOFF, deadline=soon()) is None


def test_a_snapshot_without_parts_and_one_with_an_empty_part_survive(
    server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(server.address)
    for parts in ({}, {PartKind.STATE: b"", PartKind.WINDOW_ROWS: b"w"}):
        assert client.put_snapshot(HANDOFF, replace(snapshot(), parts=parts), ttl_s=60, deadline=soon())
        found = client.get_snapshot(HANDOFF, deadline=soon())
        assert found is not None
        assert {kind: bytes(data) for kind, data in found.parts.items()} == parts


def test_a_later_snapshot_replaces_an_earlier_one(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    for boundary in (37, 38):
        client.put_snapshot(HANDOFF, snapshot(boundary_tokens=boundary), ttl_s=60, deadline=soon())
    found = client.get_snapshot(HANDOFF, deadline=soon())
    assert found is not None
    assert found.boundary_tokens == 38


def test_a_snapshot_under_another_key_is_not_used(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    elsewhere = turn_snapshot_key(chain(1)[0], mode=1)
    server.call("COPY", HANDOFF, elsewhere)
    assert client.get_snapshot(elsewhere, deadline=soon()) is None
    assert server.call("EXISTS", elsewhere) == 0
    assert client.get_snapshot(HANDOFF, deadline=soon()) is not None


def test_unlink_counts_what_was_there(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    assert client.unlink([HANDOFF, b"h:{other-1}:t"], deadline=soon()) == 1


def test_a_value_above_the_limit_is_refused_before_it_is_sent(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, value_bytes_max=8192, batch_bytes_max=8192)
    with pytest.raises(ValueError, match="value_bytes_max"):
        client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    open_client(server.address).put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    assert client.get_snapshot(HANDOFF, deadline=soon()) is None


def test_wrong_sizes_are_the_callers_mistake(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    key = chain(1)[0]
    with pytest.raises(ValueError, match="5000 bytes"):
        client.put_blocks([BlockToPut(key, b"short", exact=True)], deadline=soon())
    gaps = memoryview(bytearray(10_000))[::2]
    with pytest.raises(ValueError, match="5000 bytes"):
        client.put_blocks([BlockToPut(key, gaps, exact=True)], deadline=soon())
    with pytest.raises(ValueError, match="5000 bytes"):
        client.put_blocks([BlockToPut(key, [gaps[:2000], bytes(3000)], exact=True)], deadline=soon())
    for wrong in ([bytearray(4999)], [bytes(5000)], [gaps], [], [bytearray(5000)] * 2):
        with pytest.raises(ValueError, match="5000 bytes"):
            client.fetch_blocks([key], list(map(memoryview, wrong)), deadline=soon())


@pytest.mark.parametrize("native", [True, False])
def test_blocks_come_from_and_go_to_memory_of_any_shape(
    server: RedisServer, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    if not native:
        monkeypatch.setattr(pipeline, "NATIVE", None)
    client, keys = open_client(server.address), chain(4)
    payloads = [memoryview(bytearray(payload_of(key))) for key in keys]
    shaped = [payloads[0], payloads[1].cast("I"), payloads[2].cast("B", (50, 100)), bytearray(payloads[3])]
    blocks = [BlockToPut(key, payload, exact=True) for key, payload in zip(keys, shaped, strict=True)]
    assert until(lambda: client.put_blocks(blocks, deadline=soon()) == 4, within_s=5)
    flat = buffers(4)
    into: list[Any] = [flat[0], flat[1].cast("d"), flat[2].cast("B", (50, 100)), flat[3]]
    assert client.fetch_blocks(keys, into, deadline=soon()).count == 4
    assert flat == payloads


def test_without_a_store_everything_is_a_miss() -> None:
    client = KvClient(StoreSettings(), namespace=NAMESPACE, layout=LAYOUT, incarnation=Incarnation(1))
    keys = chain(2)
    assert client.lookup(keys, deadline=soon()) == 0
    assert client.put_blocks(to_put(keys), deadline=soon()) == 0
    assert client.fetch_blocks(keys, buffers(2), deadline=soon()) == Fetched(0, ())
    assert not client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    assert client.get_snapshot(HANDOFF, deadline=soon()) is None
    assert client.unlink([HANDOFF], deadline=soon()) == 0
    assert client.healthy
    client.close()


def test_after_it_was_closed_everything_is_a_miss(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(40)
    client.put_blocks(to_put(keys), deadline=soon())
    client.close()
    assert client.lookup(keys, deadline=soon()) == 0
    assert client.put_blocks(to_put(keys), deadline=soon()) == 0
    assert client.fetch_blocks(keys, buffers(40), deadline=soon()) == Fetched(0, ())
    assert client.get_snapshot(HANDOFF, deadline=soon()) is None
    client.close()


def test_empty_requests_are_answered_without_the_store(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    assert client.lookup([], deadline=soon()) == 0
    assert client.fetch_blocks([], [], deadline=soon()) == Fetched(0, ())
    assert client.put_blocks([], deadline=soon()) == 0


def test_threads_share_a_client(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    wrong: list[str] = []

    def work(salt: bytes) -> None:
        keys = chain(20, salt=salt)
        for _ in range(5):
            client.put_blocks(to_put(keys), deadline=soon())
            into = buffers(20)
            fetched = client.fetch_blocks(keys, into, deadline=soon())
            if fetched.count != 20 or [bytes(buffer) for buffer in into] != [payload_of(key) for key in keys]:
                wrong.append(f"{salt!r}: {fetched.count}")

    threads = [threading.Thread(target=work, args=(bytes([number]),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_runs_spread_over_servers_and_losing_one_loses_only_its_own(
    start_server: StartServer, open_client: OpenClient
) -> None:
    servers = [start_server(), start_server()]
    client = open_client(*(server.address for server in servers))
    chains = [chain(RUN_BLOCKS, salt=bytes([number])) for number in range(24)]
    for keys in chains:
        assert client.put_blocks(to_put(keys), deadline=soon()) == RUN_BLOCKS
    held = [server.call("DBSIZE") for server in servers]
    assert sum(held) == 24 * RUN_BLOCKS
    assert all(count and count % RUN_BLOCKS == 0 for count in held)
    servers[0].kill()
    found = sum(client.lookup(keys, deadline=soon()) for keys in chains)
    assert found == held[1]
    assert client.fetch_blocks(chains[0], buffers(RUN_BLOCKS), deadline=soon()).count in (0, RUN_BLOCKS)


def test_a_value_is_a_header_and_a_payload_and_nothing_else(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(1)
    client.put_blocks(to_put(keys), deadline=soon())
    stored = server.call("GET", block_store_key(keys[0]))
    assert stored[HEADER_BYTES:] == payload_of(keys[0])


def test_a_store_that_is_slower_than_computing_is_not_asked(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(16)
    client.put_blocks(to_put(keys), deadline=soon())
    shard = client._transport.shards[0]
    assert isinstance(shard, Shard)
    block_s = LAYOUT.payload_bytes / 1e6
    assert client.fetch_blocks(keys, buffers(16), deadline=soon(), block_worth_s=block_s / 2).count == 16, (
        "not measured"
    )
    shard._read_bytes_per_s, shard._speed_at_s = 1e6, SYSTEM_CLOCK.monotonic_s()
    assert client.fetch_blocks(keys, buffers(16), deadline=soon(), block_worth_s=block_s / 2).count == 0
    assert client.fetch_blocks(keys, buffers(16), deadline=soon(), block_worth_s=2 * block_s).count == 16
    shard._read_bytes_per_s, shard._speed_at_s = 1e6, SYSTEM_CLOCK.monotonic_s() - SPEED_LIFE_S
    assert client.fetch_blocks(keys, buffers(16), deadline=soon(), block_worth_s=block_s / 2).count == 16, "forgotten"


@pytest.mark.parametrize(
    ("local", "exchanges"),
    [(True, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]), (False, [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10], [9, 11]])],
)
def test_runs_are_dealt_to_connections_and_what_lies_behind_a_gap_is_not_asked_for(
    server: RedisServer,
    open_client: OpenClient,
    monkeypatch: pytest.MonkeyPatch,
    local: bool,
    exchanges: list[list[int]],
) -> None:
    """One connection at a time keeps a server on this machine busy."""
    monkeypatch.setattr(Shard, "is_local", local)
    client, keys = open_client(server.address, data_connections=2, missing_life_s=0.0), chain(16 * 12)
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == len(keys), within_s=5)
    asked: list[list[int]] = []
    read, depth_of = RedisTransport.read, {block_store_key(key): key.depth for key in keys}

    def noted(self: RedisTransport, shard: Any, sinks: Any, **how: Any) -> bool:
        asked.append([depth_of[key] for key in sinks.keys])
        return read(self, shard, sinks, **how)

    monkeypatch.setattr(RedisTransport, "read", noted)
    into = buffers(len(keys))
    assert client.fetch_blocks(keys, into, deadline=soon()).count == len(keys)
    assert [bytes(buffer) for buffer in into] == [payload_of(key) for key in keys]
    runs = sorted([depth // 16 for depth in depths[::16]] for depths in asked)
    assert runs == exchanges
    server.call("DEL", block_store_key(keys[20]))
    asked.clear()
    alone = open_client(server.address, data_connections=1)
    assert until(lambda: alone.fetch_blocks(keys, buffers(len(keys)), deadline=soon()).count == 20, within_s=5)
    assert asked == [list(range(64))]


def test_a_values_checksums_are_made_once_when_somebody_asks_for_its_pieces() -> None:
    head = bytes(256)
    value = ValueToWrite.drafted(b"key", head, (b"payload",), life_ms=5, value_bytes=263, mac=None)
    assert (value.key, value.life_ms, value.value_bytes) == (b"key", 5, 263)
    stamped = with_checksums(head, payload_checksum([b"payload"]))
    assert value.pieces == (stamped, b"payload")
    assert value.pieces is value.pieces
