from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from tests.kvstore.conftest import StartServer
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.values import soon
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.kvstore import metrics
from whalepod.kvstore.redis_transport import RedisTransport
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.transport import MadeValues, Renewal, ValueToWrite, Written

NAME = b"b:{0}:x"
VALUE = b"h" * 256 + b"payload"


def opened(server: RedisServer) -> RedisTransport:
    return RedisTransport(StoreSettings(addresses=(server.address,)), jitter=Random(1), clock=SYSTEM_CLOCK)


@pytest.fixture
def transport(server: RedisServer) -> Iterator[RedisTransport]:
    with closing(opened(server)) as transport:
        yield transport


def put(transport: RedisTransport, *, life_ms: int = 60_000, only_if_absent: bool = True) -> Written:
    to_write = ValueToWrite(NAME, (VALUE[:256], VALUE[256:]), life_ms)
    return transport.write(transport.shards[0], MadeValues([to_write]), only_if_absent=only_if_absent, deadline=soon())[
        0
    ]


def test_a_value_is_written_once_unless_it_may_be_replaced(server: RedisServer, transport: RedisTransport) -> None:
    assert put(transport) is Written.STORED
    assert put(transport) is Written.PRESENT
    assert put(transport, only_if_absent=False) is Written.STORED
    assert server.call("GET", NAME) == VALUE


@pytest.mark.parametrize(
    ("head", "value_bytes", "deleted"),
    [
        (VALUE[:256], len(VALUE), True),
        (VALUE[:3], len(VALUE), True),
        (b"", len(VALUE), False),
        (b"g" + VALUE[1:256], len(VALUE), False),
        (VALUE[:256], len(VALUE) + 1, False),
    ],
)
def test_only_the_value_that_was_read_is_deleted(
    server: RedisServer, transport: RedisTransport, head: bytes, value_bytes: int, deleted: bool
) -> None:
    put(transport)
    shard = transport.shards[0]
    assert transport.delete_if(shard, NAME, head=head, value_bytes=value_bytes, deadline=soon()) is deleted
    assert server.call("EXISTS", NAME) == (not deleted)


def test_an_empty_value_can_be_deleted(server: RedisServer, transport: RedisTransport) -> None:
    server.call("SET", NAME, b"")
    assert transport.delete_if(transport.shards[0], NAME, head=b"", value_bytes=0, deadline=soon())
    assert not transport.delete_if(transport.shards[0], b"absent", head=b"", value_bytes=0, deadline=soon())


def test_only_the_value_that_was_read_is_replaced(server: RedisServer, transport: RedisTransport) -> None:
    put(transport)
    shard = transport.shards[0]
    new = ValueToWrite(NAME, (b"n" * 256, b"new"), 5000)
    assert not transport.replace_if(shard, new, head=b"x" * 256, deadline=soon())
    assert server.call("GET", NAME) == VALUE
    assert transport.replace_if(shard, new, head=VALUE[:256], deadline=soon())
    assert server.call("GET", NAME) == b"n" * 256 + b"new"
    assert 0 < server.call("PTTL", NAME) <= 5000


def counted(code: str) -> float:
    return metrics.ERRORS.labels(code)._value.get()  # pyright: ignore[reportPrivateUsage]


def test_what_refuses_a_command_inside_a_script_is_understood_as_outside_one(start_server: StartServer) -> None:
    server = start_server()
    with closing(opened(server)) as transport:
        put(transport)
        shard, before = transport.shards[0], (counted("OOM"), counted("READONLY"), counted("ERR"))
        server.call("CONFIG", "SET", "maxmemory", "1")
        assert not transport.replace_if(shard, ValueToWrite(NAME, (b"new",), 5000), head=VALUE[:256], deadline=soon())
        assert counted("OOM") == before[0] + 1
        server.call("CONFIG", "SET", "maxmemory", "0")
        server.call("REPLICAOF", "127.0.0.1", "1")
        assert not transport.renew(shard, [Renewal(NAME, 90_000)], deadline=soon(1))
        assert counted("READONLY") > before[1]
        assert counted("ERR") == before[2]


def test_lives_are_lengthened_and_never_shortened_or_given_to_what_has_none(
    server: RedisServer, transport: RedisTransport
) -> None:
    put(transport)
    server.call("SET", b"b:{0}:endless", b"x")
    renewals = [Renewal(NAME, 90_000), Renewal(b"b:{0}:endless", 90_000), Renewal(b"b:{0}:absent", 90_000)]
    assert transport.renew(transport.shards[0], renewals, deadline=soon())
    assert 60_000 < server.call("PTTL", NAME) <= 90_000
    assert server.call("PTTL", b"b:{0}:endless") == -1
    assert transport.renew(transport.shards[0], [Renewal(NAME, 1000)], deadline=soon())
    assert server.call("PTTL", NAME) > 60_000


def test_adding_a_server_moves_only_its_share() -> None:
    addresses = tuple(StoreAddress(host="127.0.0.1", port=port) for port in (1, 2, 3, 4))
    tags = [b"b:{%d}:" % number for number in range(2000)]

    def owners(count: int) -> list[str]:
        transport = RedisTransport(StoreSettings(addresses=addresses[:count]), jitter=Random(1), clock=SYSTEM_CLOCK)
        names = [transport.shard_of(tag).name for tag in tags]
        transport.close()
        return names

    three, four = owners(3), owners(4)
    moved = [new for old, new in zip(three, four, strict=True) if old != new]
    assert set(moved) == {str(addresses[3])}
    assert len(moved) == pytest.approx(500, abs=80)
    assert three == owners(3)
