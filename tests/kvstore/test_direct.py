"""From a prefill rank's memory, over sockets, to a decode rank: the same values, and nothing for strangers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from tests.kvstore.conftest import StartServer
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.test_store_faults import LATE_S, seconds_of, until
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation, RequestId
from whalepod.kvstore.client import Fetched, KvClient
from whalepod.kvstore.direct_server import CONNECTIONS_MAX, DirectServer
from whalepod.kvstore.held_values import HeldValues
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import handoff_snapshot_key
from whalepod.kvstore.transport import ValueToWrite

KEY = b"k" * 32
HANDOFF = handoff_snapshot_key(RequestId(b"r" * 16), 1)
OpenRank = Callable[..., tuple[KvClient, str]]


@pytest.fixture
def open_rank() -> Iterator[OpenRank]:
    """Clients; with `serves`, one that others can read from at the address returned."""
    closing: list[Callable[[], None]] = []

    def open_(*addresses: StoreAddress, serves: bool = False, key: bytes = KEY) -> tuple[KvClient, str]:
        held = HeldValues(bytes_max=1 << 20, life_s=60, clock=SYSTEM_CLOCK) if serves else None
        client = KvClient(
            StoreSettings(addresses=addresses, mac_key=KEY),
            namespace=NAMESPACE,
            layout=LAYOUT,
            incarnation=Incarnation(len(closing) + 1),
            held=held,
            direct_key=key,
        )
        closing.append(client.close)
        if held is None:
            return client, ""
        server = DirectServer(held, key=KEY, host="127.0.0.1", port=0)
        closing.append(server.close)
        return client, f"127.0.0.1:{server.port}"

    yield open_
    for close in reversed(closing):
        close()


def test_without_any_store_values_go_from_rank_to_rank(open_rank: OpenRank) -> None:
    giver, address = open_rank(serves=True)
    taker, _ = open_rank()
    keys = chain(40)
    assert giver.put_blocks(to_put(keys), deadline=soon()) == 40
    assert giver.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    into = buffers(40)
    assert taker.fetch_blocks(keys, into, deadline=soon(), handed_off_by=address) == Fetched(40, (True,) * 40)
    assert [bytes(buffer) for buffer in into] == [payload_of(key) for key in keys]
    found = taker.get_snapshot(HANDOFF, deadline=soon(), handed_off_by=address)
    assert found is not None
    assert found.boundary_tokens == snapshot().boundary_tokens
    assert taker.fetch_blocks(keys, into, deadline=soon()).count == 0


def test_the_store_is_asked_first_and_the_rank_for_what_it_lost(server: RedisServer, open_rank: OpenRank) -> None:
    giver, address = open_rank(server.address, serves=True)
    taker, _ = open_rank(server.address)
    keys = chain(32)
    giver.put_blocks(to_put(keys), deadline=soon())
    server.call("FLUSHALL")
    assert taker.fetch_blocks(keys, buffers(32), deadline=soon(), handed_off_by=address).count == 32


def test_f4_a_dead_store_costs_a_hand_off_little_time(start_server: StartServer, open_rank: OpenRank) -> None:
    server = start_server()
    giver, address = open_rank(server.address, serves=True)
    taker, _ = open_rank(server.address)
    keys = chain(32)
    server.kill()
    until(lambda: not giver.healthy and not taker.healthy, within_s=2)
    assert giver.put_blocks(to_put(keys), deadline=soon()) == 32
    took = seconds_of(lambda: taker.fetch_blocks(keys, buffers(32), deadline=soon(1), handed_off_by=address))
    assert took < 1
    assert taker.fetch_blocks(keys, buffers(32), deadline=soon(), handed_off_by=address).count == 32


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no address at all::", "redis://", ""])
def test_a_rank_that_is_gone_is_a_miss_in_time(open_rank: OpenRank, address: str) -> None:
    taker, _ = open_rank()
    keys = chain(3)
    took = seconds_of(lambda: taker.fetch_blocks(keys, buffers(3), deadline=soon(0.5), handed_off_by=address))
    assert took < 0.5 + LATE_S
    assert taker.get_snapshot(HANDOFF, deadline=soon(0.2), handed_off_by=address) is None


def test_a_reader_with_another_secret_gets_nothing(open_rank: OpenRank) -> None:
    giver, address = open_rank(serves=True)
    stranger, _ = open_rank(key=b"x" * 32)
    giver.put_blocks(to_put(chain(3)), deadline=soon())
    assert stranger.fetch_blocks(chain(3), buffers(3), deadline=soon(1), handed_off_by=address).count == 0


@pytest.mark.parametrize(
    "words",
    [
        b"*2\r\n$3\r\nGET\r\n$1\r\nx\r\n",
        b"*2\r\n$4\r\nAUTH\r\n$32\r\n" + bytes(32) + b"\r\n",
        b"*2\r\n$5\r\nHELLO\r\n$3\r\nabc\r\n",
        b"*99999999\r\n",
        b"*2\r\n$99999999\r\n",
        b"GET x\r\n",
        b"\0\xff" * 100,
    ],
)
def test_who_does_not_greet_properly_is_cut_off(open_rank: OpenRank, words: bytes) -> None:
    giver, address = open_rank(serves=True)
    giver.put_blocks(to_put(chain(1)), deadline=soon())
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=5) as stranger:
        stranger.sendall(words)
        stranger.shutdown(socket.SHUT_WR)
        assert _rest(stranger) == b""


def test_a_replayed_proof_is_worthless(open_rank: OpenRank) -> None:
    _, address = open_rank(serves=True)
    port = int(address.rpartition(":")[2])
    hello = b"*2\r\n$5\r\nHELLO\r\n$32\r\n" + b"n" * 32 + b"\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.sendall(hello)
        reply = stranger.recv(4096)
        proof = reply.rpartition(b"$32\r\n")[2][:32]
        stranger.sendall(b"*2\r\n$4\r\nAUTH\r\n$32\r\n" + proof + b"\r\n")
        assert _rest(stranger) == b""


def test_connections_are_bounded(open_rank: OpenRank) -> None:
    _, address = open_rank(serves=True)
    port = int(address.rpartition(":")[2])
    held = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(CONNECTIONS_MAX)]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as one_more:
        assert _rest(one_more) == b""
    for connection in held:
        connection.close()


def test_held_values_are_bounded_in_bytes_and_time() -> None:
    clock = _Clock()
    held = HeldValues(bytes_max=25, life_s=10, clock=clock)
    held.keep(ValueToWrite(bytes([number]), (b"x" * 10,), 1) for number in range(3))
    assert [held.find(bytes([number])) is not None for number in range(3)] == [False, True, True]
    clock.now_s = 10.0
    assert held.find(b"\2") is None
    assert held.bytes == 0


class _Clock:
    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def _rest(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    data = b""
    try:
        while chunk := connection.recv(4096):
            data += chunk
    except ConnectionResetError:
        pass
    return data
