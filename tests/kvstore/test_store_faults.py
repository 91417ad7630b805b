"""What a real server can do to us (`kvstore.md` §8): the answer is a miss, in time; hits come back with the server."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kvstore.conftest import OpenClient, StartServer
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.values import buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import RequestId
from whalepod.kvstore.client import Fetched, KvClient
from whalepod.kvstore.settings import StoreAddress
from whalepod.kvstore.store_keys import block_store_key, handoff_snapshot_key

LATE_S = 0.05
"""What an operation may take past its deadline."""
HANDOFF = handoff_snapshot_key(RequestId(b"r" * 16), 1)


def until(condition: Callable[[], bool], *, within_s: float) -> bool:
    """Ask again and again; whether it came true in time."""
    deadline = Deadline.after(within_s)
    while not deadline.expired:
        if condition():
            return True
        threading.Event().wait(0.01)
    return condition()


def seconds_of(call: Callable[[], object]) -> float:
    """How long it took, less what our threads waited for a core: other programs of the machine are not our lateness."""
    start, waited = SYSTEM_CLOCK.monotonic_s(), _waited_for_cores_s()
    call()
    return SYSTEM_CLOCK.monotonic_s() - start - max(0.0, _waited_for_cores_s() - waited)


def _waited_for_cores_s() -> float:
    """All threads of this process, since each began: the second number of Linux' `schedstat`, in nanoseconds."""
    waited = 0
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            waited += int((thread / "schedstat").read_text().split()[1])
    return waited / 1e9


def fetch(client: KvClient, keys: list[BlockKey], *, seconds: float = 5.0) -> int:
    """Leading blocks fetched, each of which must hold the right bytes."""
    into = buffers(len(keys))
    fetched = client.fetch_blocks(keys, into, deadline=soon(seconds))
    assert [bytes(buffer) for buffer in into[: fetched.count]] == [payload_of(key) for key in keys[: fetched.count]]
    return fetched.count


def test_f1_an_absent_server_is_a_quick_miss_and_is_found_once_it_is_there(
    start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server()
    server.kill()
    client = open_client(server.address)
    keys = chain(4)
    assert until(lambda: not client.healthy, within_s=1)
    assert seconds_of(lambda: client.put_blocks(to_put(keys), deadline=soon())) < 0.05
    assert seconds_of(lambda: client.lookup(keys, deadline=soon())) < 0.05
    server.start()
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 4, within_s=2)
    assert fetch(client, keys) == 4


def test_f1_a_name_that_leads_nowhere_is_a_miss(open_client: OpenClient) -> None:
    client = open_client(StoreAddress(path="/nonexistent/socket"), StoreAddress(host="store.invalid"))
    assert client.put_blocks(to_put(chain(4)), deadline=soon(1)) == 0
    assert client.lookup(chain(4), deadline=soon(1)) == 0


def test_f2_killed_under_load_nobody_waits_and_hits_come_back(
    start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server()
    client = open_client(server.address)
    keys = chain(64)
    client.put_blocks(to_put(keys), deadline=soon())
    stop = threading.Event()
    late: list[float] = []

    def load() -> None:
        while not stop.is_set():
            took = seconds_of(lambda: fetch(client, keys, seconds=0.3))
            if took > 0.3 + LATE_S:
                late.append(took)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.kill()
    unavailable = until(lambda: not client.healthy, within_s=1)
    server.start()
    stored = until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 64, within_s=3)
    found = fetch(client, keys)
    stop.set()
    for thread in threads:
        thread.join()
    assert (unavailable, stored, found, late) == (True, True, 64, [])


@pytest.mark.parametrize("way", ["pause", "sleep", "freeze"])
def test_f3_f12_a_server_that_stops_answering_costs_no_more_than_the_deadline(
    start_server: StartServer, open_client: OpenClient, way: str
) -> None:
    server = start_server()
    client = open_client(server.address)
    keys = chain(20)
    client.put_blocks(to_put(keys), deadline=soon())
    sleeper = threading.Thread(target=lambda: server.call("DEBUG", "SLEEP", "1.5"))
    if way == "pause":
        server.call("CLIENT", "PAUSE", "1500")
    elif way == "sleep":
        sleeper.start()
        until(lambda: fetch(client, keys, seconds=0.1) == 0, within_s=1)
    else:
        server.freeze()
    attempts: list[Callable[[], object]] = [
        lambda: fetch(client, keys, seconds=0.1),
        lambda: client.lookup(keys, deadline=soon(0.1)),
        lambda: client.put_blocks(to_put(keys), deadline=soon(0.1)),
        lambda: client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon(0.1)),
        lambda: client.get_snapshot(HANDOFF, deadline=soon(0.1)),
        lambda: client.unlink([HANDOFF], deadline=soon(0.1)),
    ]
    assert [took for took in map(seconds_of, attempts) if took > 0.1 + LATE_S] == []
    assert until(lambda: not client.healthy, within_s=1)
    assert seconds_of(lambda: client.lookup(keys, deadline=soon())) < 0.01
    if way == "sleep":
        sleeper.join()
    elif way == "freeze":
        server.thaw()
    assert until(lambda: fetch(client, keys) == 20, within_s=3)


def test_an_expired_deadline_is_a_miss_that_costs_no_connection(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(2)
    client.put_blocks(to_put(keys), deadline=soon())
    connections = server.call("INFO", "stats")["total_connections_received"]
    assert client.lookup(keys, deadline=soon(0)) == 0
    assert client.fetch_blocks(keys, buffers(2), deadline=soon(0)) == Fetched(0, ())
    assert not client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon(0))
    assert client.lookup(keys, deadline=soon()) == 2
    assert server.call("INFO", "stats")["total_connections_received"] <= connections + 1  # the question's own


def test_f12_a_restarted_server_is_used_by_the_very_next_call(
    start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server()
    client = open_client(server.address)
    keys = chain(4)
    client.put_blocks(to_put(keys), deadline=soon())
    assert until(lambda: server.call("INFO", "clients")["connected_clients"] == 3 + 1, within_s=2)  # ours and this
    server.kill()
    server.start()
    assert client.put_blocks(to_put(keys), deadline=soon()) == 4


def test_f12_connections_that_the_server_closed_are_not_used(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(4)
    client.put_blocks(to_put(keys), deadline=soon())
    for _ in range(5):
        server.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert client.lookup(keys, deadline=soon()) == 4
        assert fetch(client, keys) == 4


def test_f5_a_full_server_drops_writes_and_keeps_serving(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    client = open_client(server.address)
    keys = chain(1000)
    stored = client.put_blocks(to_put(keys), deadline=soon())
    assert 16 <= stored < 1000
    # What a refused batch took to be read is free again, so the next small ones may still fit.
    salts = (b"x%d" % number for number in range(400))
    assert any(client.put_blocks(to_put(chain(4, salt=salt)), deadline=soon()) < 4 for salt in salts)
    handoffs = (handoff_snapshot_key(RequestId(bytes(16)), number) for number in range(400))
    assert any(not client.put_snapshot(key, snapshot(), ttl_s=60, deadline=soon()) for key in handoffs)
    assert client.healthy
    assert fetch(client, keys[:16]) == 16


def test_f15_f16_an_evicting_server_keeps_prefixes_and_never_a_wrong_byte(
    start_server: StartServer, open_client: OpenClient
) -> None:
    server = start_server("--maxmemory", "3mb", "--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "10")
    client = open_client(server.address)
    for number in range(20):
        keys = chain(64, salt=bytes([number]))
        assert client.put_blocks(to_put(keys), deadline=soon()) == 64
        # Reading needs memory too, so it may go on evicting.
        assert 0 < fetch(client, keys) <= client.lookup(keys, deadline=soon()) + 64


def test_f6_a_replica_is_read_and_not_written(start_server: StartServer, open_client: OpenClient) -> None:
    primary, replica = start_server(), start_server()
    client = open_client(replica.address)
    keys = chain(4)
    client.put_blocks(to_put(keys[:2]), deadline=soon())
    replica.call("REPLICAOF", "127.0.0.1", str(primary.port))
    assert client.put_blocks(to_put(keys), deadline=soon()) < 4
    assert client.healthy
    replica.call("REPLICAOF", "NO", "ONE")
    assert until(lambda: client.put_blocks(to_put(keys), deadline=soon()) == 4, within_s=1)


def test_f9_a_replica_without_its_primary_is_a_miss(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server("--replica-serve-stale-data", "no")
    client = open_client(server.address)
    keys = chain(4)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("REPLICAOF", "127.0.0.1", "1")
    assert client.lookup(keys, deadline=soon()) == 0
    assert fetch(client, keys) == 0
    server.call("REPLICAOF", "NO", "ONE")
    assert until(lambda: fetch(client, keys) == 4, within_s=2)


def test_f10_a_busy_script_is_waited_out_as_a_fault(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server("--lua-time-limit", "10")
    client = open_client(server.address)
    keys = chain(4)
    client.put_blocks(to_put(keys), deadline=soon())

    def endless() -> None:
        with pytest.raises(Exception, match="killed"):
            server.call("EVAL", "while true do end", "0")

    busy = threading.Thread(target=endless)
    busy.start()
    assert until(lambda: client.lookup(keys, deadline=soon(0.1)) == 0, within_s=1)
    server.call("SCRIPT", "KILL")
    busy.join()
    assert until(lambda: client.lookup(keys, deadline=soon()) == 4, within_s=2)


@pytest.mark.parametrize("password", ["", "wrong"])
def test_f11_a_server_that_refuses_us_is_given_up_and_says_so(
    start_server: StartServer, open_client: OpenClient, password: str
) -> None:
    server = start_server()
    server.call("CONFIG", "SET", "requirepass", "right")
    address = StoreAddress(host="127.0.0.1", port=server.port, password=password)
    client = open_client(address)
    assert client.lookup(chain(4), deadline=soon()) == 0
    assert until(lambda: client.health()[0].disabled_by is not None, within_s=1)
    assert not client.healthy
    assert seconds_of(lambda: client.lookup(chain(4), deadline=soon())) < 0.01
    known = open_client(StoreAddress(host="127.0.0.1", port=server.port, password="right"))
    assert known.put_blocks(to_put(chain(4)), deadline=soon()) == 4


def test_a_user_with_few_permissions_is_enough(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server()
    commands = [f"+{name}" for name in ("get", "set", "exists", "getrange", "unlink", "eval", "evalsha")]
    commands += [f"+{name}" for name in ("strlen", "pttl", "pexpire")]  # what the scripts call
    server.call("ACL", "SETUSER", "engine", "on", ">secret", "~b:*", "~t:*", "~h:*", "resetchannels", *commands)
    user = StoreAddress(host="127.0.0.1", port=server.port, username="engine", password="secret")
    client = open_client(user)
    keys = chain(4)
    assert client.put_blocks(to_put(keys, exact=False), deadline=soon()) == 4
    assert client.put_blocks(to_put(keys, writer=0), deadline=soon()) == 4
    assert client.lookup(keys, deadline=soon()) == 4
    assert fetch(client, keys) == 4
    assert client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    assert client.get_snapshot(HANDOFF, deadline=soon(), unlink=True) is not None


def test_a_user_without_scripts_still_reads_and_writes(start_server: StartServer, open_client: OpenClient) -> None:
    server = start_server()
    server.call("ACL", "SETUSER", "engine", "on", ">secret", "~*", "+get", "+set", "+exists")
    client = open_client(StoreAddress(host="127.0.0.1", port=server.port, username="engine", password="secret"))
    keys = chain(4)
    assert client.put_blocks(to_put(keys), deadline=soon()) == 4
    reader = open_client(StoreAddress(host="127.0.0.1", port=server.port, username="engine", password="secret"))
    assert fetch(reader, keys) == 4
    assert reader.healthy


def test_f10_scripts_that_the_server_forgot_are_sent_again(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, touch_interval_s=0.0)
    keys = chain(4)
    client.put_blocks(to_put(keys, exact=False), deadline=soon())
    server.call("SCRIPT", "FLUSH")
    assert fetch(client, keys) == 4
    server.call("SCRIPT", "FLUSH")
    assert client.put_blocks(to_put(keys), deadline=soon()) == 4
    assert client.fetch_blocks(keys, buffers(4), deadline=soon()).exact == (True,) * 4


def test_f15_f16_blocks_deleted_between_lookup_and_fetch_shorten_the_prefix(
    server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(server.address)
    keys = chain(40)
    draw = random.Random(5)
    for _ in range(30):
        client.put_blocks(to_put(keys), deadline=soon())
        assert client.lookup(keys, deadline=soon()) == 40
        lost = draw.sample(range(40), draw.randint(1, 5))
        server.call("DEL", *(block_store_key(keys[index]) for index in lost))
        assert fetch(client, keys) == min(lost)


@pytest.mark.parametrize("at", [0, 5, 9, 40, 70, 98, 106, 115, 154, 249, 255, 256, 5000])
def test_f17_a_changed_byte_is_a_miss_and_the_value_is_removed(
    server: RedisServer, open_client: OpenClient, at: int
) -> None:
    client = open_client(server.address)
    keys = chain(20)
    client.put_blocks(to_put(keys), deadline=soon())
    name = block_store_key(keys[7])
    byte = server.call("GETRANGE", name, at, at)
    server.call("SETRANGE", name, at, bytes([byte[0] ^ 0x10]))
    assert fetch(client, keys) == 7
    assert server.call("EXISTS", name) == 0
    assert client.put_blocks(to_put(keys), deadline=soon()) == 20
    assert fetch(client, keys) == 20


@pytest.mark.parametrize("length", [0, 1, 255, 256, 5255, 5257, 9000, 6_000_000])
def test_f17_a_value_of_another_length_is_a_miss_and_is_removed(
    server: RedisServer, open_client: OpenClient, length: int
) -> None:
    client = open_client(server.address)
    keys = chain(20)
    client.put_blocks(to_put(keys), deadline=soon())
    name = block_store_key(keys[7])
    whole = server.call("GET", name)
    server.call("SET", name, (whole + bytes(length))[:length])
    assert fetch(client, keys) == 7
    assert until(lambda: server.call("EXISTS", name) == 0, within_s=0.5)
    assert fetch(client, keys[8:]) == 12


def test_f17_a_block_under_another_blocks_name_is_a_miss_and_is_removed(
    server: RedisServer, open_client: OpenClient
) -> None:
    client = open_client(server.address)
    keys = chain(4)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("COPY", block_store_key(keys[2]), block_store_key(keys[1]), "REPLACE")
    assert fetch(client, keys) == 1
    assert server.call("EXISTS", block_store_key(keys[1])) == 0


def test_f17_another_type_under_a_blocks_name_is_a_miss(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    keys = chain(4)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("DEL", block_store_key(keys[1]))
    server.call("LPUSH", block_store_key(keys[1]), "x")
    assert fetch(client, keys) == 1
    assert fetch(client, keys[2:]) == 2
    assert client.healthy


def test_f17_a_corrupt_snapshot_is_a_miss_and_is_removed(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address)
    client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    server.call("SETRANGE", HANDOFF, 1000, b"\xff\x00\xff")
    assert client.get_snapshot(HANDOFF, deadline=soon()) is None
    assert server.call("EXISTS", HANDOFF) == 0


def test_f17_something_else_under_a_blocks_name_is_a_miss_and_is_removed(
    server: RedisServer, open_client: OpenClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = open_client(server.address, missing_life_s=0.0)
    keys = chain(20)
    for _ in range(3):
        client.put_blocks(to_put(keys), deadline=soon())
        for key in (keys[4], keys[17]):
            server.call("DEL", block_store_key(key))
            server.call("RPUSH", block_store_key(key), "no value of ours")
        assert fetch(client, keys) == 4
        assert fetch(client, keys[5:17]) == 12
        assert fetch(client, [keys[17]]) == 0
    assert client.put_blocks(to_put(keys), deadline=soon()) == 20
    assert fetch(client, keys) == 20
    assert client.healthy
    assert sum("under our names" in record.message for record in caplog.records) == 1
    assert not any("WRONGTYPE" in record.message for record in caplog.records)
