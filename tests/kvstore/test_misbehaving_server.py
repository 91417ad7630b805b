"""A server that answers wrongly, at any position of a pipeline: the prefix before it is right, and nothing after is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from tests.kvstore.conftest import OpenClient
from tests.kvstore.scripted_server import Handler, ScriptedServer
from tests.kvstore.test_store_faults import seconds_of, until
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation, RequestId
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.store_keys import block_store_key, handoff_snapshot_key
from whalepod.kvstore.value_format import HEADER_BYTES, flat
from whalepod.kvstore.value_writer import ValueWriter

KEYS = chain(16)
NAMES = [block_store_key(key) for key in KEYS]
HANDOFF = handoff_snapshot_key(RequestId(b"r" * 16), 1)
WRITER = ValueWriter(NAMESPACE, LAYOUT, Incarnation(1), StoreSettings(), SYSTEM_CLOCK)
VALUES = {
    name: b"".join(WRITER.block(key, (flat(payload_of(key)),), exact=True).pieces)
    for key, name in zip(KEYS, NAMES, strict=True)
}
StartScripted = Callable[[Handler], ScriptedServer]


@pytest.fixture
def scripted() -> Iterator[StartScripted]:
    started: list[ScriptedServer] = []

    def start(handler: Handler) -> ScriptedServer:
        started.append(ScriptedServer(handler))
        return started[-1]

    yield start
    for server in started:
        server.close()


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n" % len(value) + value + b"\r\n"


def honest(words: list[bytes]) -> bytes:
    match words[0]:
        case b"GET":
            return bulk(VALUES[words[1]]) if words[1] in VALUES else b"$-1\r\n"
        case b"SET":
            return b"+OK\r\n"
        case b"EXISTS":
            return b":1\r\n"
        case _:
            return b":0\r\n"


def fetched(client: KvClient, *, seconds: float = 5.0) -> int:
    into = buffers(16)
    count = client.fetch_blocks(KEYS, into, deadline=soon(seconds)).count
    assert [bytes(buffer) for buffer in into[:count]] == [payload_of(key) for key in KEYS[:count]]
    return count


SOUND = {
    "null": b"$-1\r\n",
    "null of RESP3": b"_\r\n",
    "error": b"-ERR what\r\n",
    "unknown error": b"-STRANGE thing\r\n",
    "moved": b"-MOVED 3999 127.0.0.1:6381\r\n",
    "empty value": b"$0\r\n\r\n",
    "short value": bulk(b"x" * 255),
    "other value": bulk(b"x" * 5256),
    "long value": bulk(b"x" * 9000),
    "push, then null": b">2\r\n+message\r\n+hello\r\n$-1\r\n",
}
UNSOUND = {
    "integer": b":5\r\n",
    "status": b"+OK\r\n",
    "array": b"*1\r\n$1\r\nx\r\n",
    "no end": bulk(b"y" * 5256)[:-2] + b"xx",
    "longer than announced": b"$5256\r\n" + b"y" * 5300 + b"\r\n",
    "negative": b"$-7x\r\n",
    "junk": b"\x00\xff\r\n",
    "loading": b"-LOADING dataset\r\n",
    "clusterdown": b"-CLUSTERDOWN down\r\n",
}


@pytest.mark.parametrize("position", [0, 7, 15])
@pytest.mark.parametrize("reply", SOUND.values(), ids=SOUND)
def test_f8_f17_one_wrong_reply_costs_its_block_and_not_the_connection(
    scripted: StartScripted, open_client: OpenClient, reply: bytes, position: int
) -> None:
    wrong = [True]

    def handler(words: list[bytes]) -> bytes:
        return reply if wrong[0] and words == [b"GET", NAMES[position]] else honest(words)

    server = scripted(handler)
    client = open_client(server.address, missing_life_s=0.0)
    assert fetched(client) == position
    wrong[0] = False
    assert fetched(client) == 16
    assert server.connections <= 3


@pytest.mark.parametrize("position", [0, 7, 15])
@pytest.mark.parametrize("reply", UNSOUND.values(), ids=UNSOUND)
def test_f9_f12_a_reply_that_makes_no_sense_costs_the_connection_and_no_wrong_byte(
    scripted: StartScripted, open_client: OpenClient, reply: bytes, position: int
) -> None:
    wrong = [True]

    def handler(words: list[bytes]) -> bytes:
        return reply if wrong[0] and words == [b"GET", NAMES[position]] else honest(words)

    server = scripted(handler)
    client = open_client(server.address)
    assert fetched(client, seconds=0.5) == position
    wrong[0] = False
    assert fetched(client) == 16
    assert server.connections >= 3


@pytest.mark.parametrize("cut", [0, 1, 5, 8, 100, 255, 264, 265, 3000, 5264])
@pytest.mark.parametrize("way", ["close", "stall"])
def test_f12_a_reply_that_stops_anywhere_is_a_miss_in_time(
    scripted: StartScripted, open_client: OpenClient, cut: int, way: str
) -> None:
    released = threading.Event()

    def handler(words: list[bytes]) -> bytes | None:
        if words == [b"GET", NAMES[5]] and not released.is_set():
            return bulk(VALUES[NAMES[5]])[:cut]
        if words[0] == b"GET" and words[1] in NAMES[6:] and not released.is_set():
            if way == "close":
                return None
            released.wait(10)
            return b""
        return honest(words)

    client = open_client(scripted(handler).address)
    counts: list[int] = []
    took_s = seconds_of(lambda: counts.append(fetched(client, seconds=0.3)))
    released.set()
    assert counts == [5]
    assert took_s < 0.45
    assert fetched(client) == 16


def test_f12_a_late_reply_never_answers_the_next_question(scripted: StartScripted, open_client: OpenClient) -> None:
    asked, release = threading.Event(), threading.Event()

    def handler(words: list[bytes]) -> bytes:
        if words == [b"GET", NAMES[0]] and not asked.is_set():
            asked.set()
            release.wait(10)
            return bulk(VALUES[NAMES[1]])  # what would be right for the next question
        return honest(words)

    server = scripted(handler)
    client = open_client(server.address, data_connections=1)
    one = buffers(1)
    assert client.fetch_blocks(KEYS[:1], one, deadline=soon(0.05)).count == 0
    release.set()
    for key in (KEYS[1], KEYS[0], KEYS[2]):
        assert client.fetch_blocks([key], one, deadline=soon()).count == 1
        assert bytes(one[0]) == payload_of(key)


def test_f12_unasked_bytes_on_an_idle_connection_are_not_an_answer(
    scripted: StartScripted, open_client: OpenClient
) -> None:
    def handler(words: list[bytes]) -> bytes:
        extra = b"$-1\r\n" if words == [b"GET", NAMES[0]] else b""
        return honest(words) + extra

    client = open_client(scripted(handler).address, data_connections=1)
    client.put_blocks(to_put(KEYS), deadline=soon())  # so that no renewal follows a value
    one = buffers(1)
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[2]):
        assert client.fetch_blocks([key], one, deadline=soon()).count == 1
        assert bytes(one[0]) == payload_of(key)


@pytest.mark.parametrize("code", ["OOM", "MISCONF", "NOREPLICAS", "TRYAGAIN", "SOMETHING"])
@pytest.mark.parametrize("position", [0, 7, 15])
def test_f5_a_refused_write_ends_the_prefix_that_is_held(
    scripted: StartScripted, open_client: OpenClient, code: str, position: int
) -> None:
    def handler(words: list[bytes]) -> bytes:
        refused = words[:2] == [b"SET", NAMES[position]]
        return b"-%s no\r\n" % code.encode() if refused else honest(words)

    client = open_client(scripted(handler).address)
    assert client.put_blocks(to_put(KEYS), deadline=soon()) == position
    assert client.healthy


@pytest.mark.parametrize("reply", [b":1\r\n", b"+QUEUED\r\n", b"*0\r\n", b"$0\r\n\r\n"])
def test_f12_a_write_that_is_answered_by_something_else_is_not_held_and_costs_the_connection(
    scripted: StartScripted, open_client: OpenClient, reply: bytes
) -> None:
    wrong = [True]

    def handler(words: list[bytes]) -> bytes:
        return reply if wrong[0] and words[:2] == [b"SET", NAMES[7]] else honest(words)

    server = scripted(handler)
    client = open_client(server.address)
    assert client.put_blocks(to_put(KEYS), deadline=soon(0.5)) == 7
    wrong[0] = False
    assert client.put_blocks(to_put(KEYS), deadline=soon()) == 16
    assert server.connections >= 3


def test_what_is_stored_past_a_refused_block_does_not_count(scripted: StartScripted, open_client: OpenClient) -> None:
    keys = chain(64)
    others_done, side_by_side = threading.Event(), list[bool]()
    refused = block_store_key(keys[7])

    def handler(words: list[bytes]) -> bytes:
        if words[:2] == [b"SET", block_store_key(keys[32])]:
            others_done.set()
        if words[:2] == [b"SET", refused]:
            side_by_side.append(others_done.wait(1))
            return b"-OOM no\r\n"
        return honest(words)

    client = open_client(scripted(handler).address, data_connections=2, data_timeout_s=5.0)

    def put() -> bool:
        """Whether both connections were open in time."""
        others_done.clear()
        assert client.put_blocks(to_put(keys), deadline=soon()) == 7
        return side_by_side[-1]

    assert until(put, within_s=5)


def test_a_server_that_hangs_up_is_not_hammered(scripted: StartScripted, open_client: OpenClient) -> None:
    server = scripted(lambda _: None)
    client = open_client(server.address)
    threading.Event().wait(1.0)
    assert 3 <= server.connections <= 10
    assert not client.healthy


@pytest.mark.parametrize("code", ["NOAUTH Authentication required.", "WRONGPASS bad", "NOPERM no"])
def test_f11_a_refusal_in_mid_life_disables_the_store_quietly(
    scripted: StartScripted, open_client: OpenClient, code: str
) -> None:
    def handler(words: list[bytes]) -> bytes:
        return b"-%s\r\n" % code.encode() if words[0] == b"GET" else honest(words)

    server = scripted(handler)
    client = open_client(server.address)
    assert fetched(client) == 0
    assert client.health()[0].disabled_by
    assert client.put_blocks(to_put(KEYS), deadline=soon()) == 0
    assert not any(words[0] == b"SET" for words in server.commands)


def test_f9_a_server_with_too_many_clients_is_not_given_up(scripted: StartScripted, open_client: OpenClient) -> None:
    full = [True]

    def handler(words: list[bytes]) -> bytes | None:
        return b"-ERR max number of clients reached\r\n" if full[0] else honest(words)

    client = open_client(scripted(handler).address)
    assert fetched(client) == 0
    assert client.health()[0].disabled_by is None
    full[0] = False
    assert any(fetched(client) == 16 or threading.Event().wait(0.05) for _ in range(60))


def test_every_command_dies_and_nothing_is_raised(scripted: StartScripted, open_client: OpenClient) -> None:
    def handler(words: list[bytes]) -> bytes | None:
        return honest(words) if words[:2] == [b"EXISTS", b"b:{probe}:"] else None

    client = open_client(scripted(handler).address)
    for _ in range(8):
        assert fetched(client, seconds=0.2) == 0
        assert client.lookup(KEYS, deadline=soon(0.2)) == 0
        assert client.put_blocks(to_put(KEYS), deadline=soon(0.2)) == 0
        assert client.get_snapshot(HANDOFF, deadline=soon(0.2)) is None
        assert not client.put_snapshot(HANDOFF, snapshot(), ttl_s=9, deadline=soon(0.2))
        assert client.unlink([HANDOFF], deadline=soon(0.2)) == 0


def test_f17_a_header_that_promises_terabytes_allocates_nothing(
    scripted: StartScripted, open_client: OpenClient
) -> None:
    def handler(words: list[bytes]) -> bytes:
        if words[0] == b"GET":
            value = b"".join(WRITER.snapshot(HANDOFF, snapshot(), life_ms=1).pieces)
            return b"$%d\r\n" % (1 << 44) + value[:HEADER_BYTES]
        return honest(words)

    client = open_client(scripted(handler).address)
    assert client.get_snapshot(HANDOFF, deadline=soon(0.5)) is None
    assert client.healthy
