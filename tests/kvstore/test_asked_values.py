"""What is asked for before a read is prepared: each value once, and no connection is lost or held for it."""

from __future__ import annotations

import threading

import pytest

from tests.kvstore.conftest import OpenClient
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.values import buffers, chain, payload_of, soon, to_put


def connections_of(server: RedisServer) -> set[str]:
    """Those that are open, but for the one that asks."""
    listed = server.call("CLIENT", "LIST").decode().splitlines()
    return {line.split()[0] for line in listed if "cmd=client" not in line}


def test_what_is_asked_for_early_is_asked_for_once(server: RedisServer, open_client: OpenClient) -> None:
    client, keys = open_client(server.address), chain(40)
    client.put_blocks(to_put(keys), deadline=soon())
    server.call("CONFIG", "RESETSTAT")
    assert client.fetch_blocks(keys, buffers(40), deadline=soon()).count == 40
    assert server.call("INFO", "commandstats")["cmdstat_get"]["calls"] == 40


def test_a_read_that_is_not_made_leaves_its_connection_as_it_was(server: RedisServer, open_client: OpenClient) -> None:
    client, keys = open_client(server.address, data_connections=1), chain(8)
    client.put_blocks(to_put(keys), deadline=soon())
    before = connections_of(server)
    with pytest.raises(ValueError, match="each block has a buffer"):
        client.fetch_blocks(keys, [*buffers(7), memoryview(b"read-only")], deadline=soon())
    assert client.fetch_blocks(keys, buffers(8), deadline=soon()).count == 8
    assert before <= connections_of(server)


def test_many_who_want_the_same_blocks_lose_no_connection(server: RedisServer, open_client: OpenClient) -> None:
    client, keys = open_client(server.address), chain(20)
    client.put_blocks(to_put(keys), deadline=soon())
    before, counts = connections_of(server), list[int]()

    def fetch() -> None:
        for _ in range(30):
            into = buffers(20)
            counts.append(client.fetch_blocks(keys, into, deadline=soon()).count)
            assert [bytes(buffer) for buffer in into] == [payload_of(key) for key in keys]

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [20] * 120
    assert before <= connections_of(server)


def test_blocks_known_to_be_missing_are_not_asked_for_early(server: RedisServer, open_client: OpenClient) -> None:
    client, keys = open_client(server.address), chain(8)
    assert client.fetch_blocks(keys, buffers(8), deadline=soon()).count == 0
    server.call("CONFIG", "RESETSTAT")
    assert client.fetch_blocks(keys, buffers(8), deadline=soon()).count == 0
    assert "cmdstat_get" not in server.call("INFO", "commandstats")
