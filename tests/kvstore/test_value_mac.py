"""Signed values: only a holder of the key can write what is used."""

from __future__ import annotations

import pytest

from tests.kvstore.conftest import OpenClient
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.values import buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.ids import RequestId
from whalepod.kvstore.client import Fetched
from whalepod.kvstore.store_keys import block_store_key, handoff_snapshot_key
from whalepod.kvstore.value_format import EXTENSION_BYTES, HEADER_BYTES
from whalepod.kvstore.value_mac import ValueMac

KEY = b"k" * 32
HANDOFF = handoff_snapshot_key(RequestId(b"r" * 16), 1)


def test_a_mac_covers_header_and_payload_but_not_the_checksums() -> None:
    mac, head, payload = ValueMac(KEY), bytes(range(256)), [b"pay", b"load"]
    extension = mac.extension(head, payload)
    assert len(extension) == EXTENSION_BYTES
    assert mac.verifies(head, [b"payload"], extension)
    assert not mac.verifies(head, [b"paylord"], extension)
    assert not ValueMac(b"x" * 32).verifies(head, payload, extension)
    for at in range(256):
        changed = head[:at] + bytes([head[at] ^ 1]) + head[at + 1 :]
        assert mac.verifies(changed, payload, extension) == (112 <= at < 120 or at >= 252), at


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ValueMac(b"short")


def test_signed_values_come_back(server: RedisServer, open_client: OpenClient) -> None:
    client = open_client(server.address, mac_key=KEY)  # type: ignore[arg-type]
    keys = chain(20)
    assert client.put_blocks(to_put(keys), deadline=soon()) == 20
    into = buffers(20)
    assert client.fetch_blocks(keys, into, deadline=soon()) == Fetched(20, (True,) * 20)
    assert [bytes(buffer) for buffer in into] == [payload_of(key) for key in keys]
    assert client.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    found = client.get_snapshot(HANDOFF, deadline=soon())
    assert found is not None
    assert {kind: bytes(part) for kind, part in found.parts.items()} == dict(snapshot().parts)


def test_a_reader_that_asks_for_no_mac_reads_signed_values_too(server: RedisServer, open_client: OpenClient) -> None:
    keys = chain(3)
    signer = open_client(server.address, mac_key=KEY)  # type: ignore[arg-type]
    assert signer.put_blocks(to_put(keys), deadline=soon()) == 3
    into = buffers(3)
    assert open_client(server.address).fetch_blocks(keys, into, deadline=soon()).count == 3
    assert bytes(into[2]) == payload_of(keys[2])


@pytest.mark.parametrize("forger_key", [None, b"another key of 32 bytes, at least"])
def test_what_is_not_signed_with_the_clusters_key_is_a_miss_and_is_removed(
    server: RedisServer, open_client: OpenClient, forger_key: bytes | None
) -> None:
    keys = chain(3)
    forger = open_client(server.address, mac_key=forger_key)  # type: ignore[arg-type]
    forger.put_blocks(to_put(keys), deadline=soon())
    forger.put_snapshot(HANDOFF, snapshot(), ttl_s=60, deadline=soon())
    reader = open_client(server.address, incarnation=2, mac_key=KEY)  # type: ignore[arg-type]
    assert reader.fetch_blocks(keys[:1], buffers(1), deadline=soon()).count == 0
    assert reader.get_snapshot(HANDOFF, deadline=soon()) is None
    assert server.call("EXISTS", block_store_key(keys[0]), HANDOFF) == 0


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 40, HEADER_BYTES + EXTENSION_BYTES, 5000])
def test_a_changed_byte_of_a_signed_value_is_a_miss(server: RedisServer, open_client: OpenClient, at: int) -> None:
    keys = chain(2)
    client = open_client(server.address, mac_key=KEY)  # type: ignore[arg-type]
    client.put_blocks(to_put(keys), deadline=soon())
    name = block_store_key(keys[1])
    byte = server.call("GETRANGE", name, at, at)
    server.call("SETRANGE", name, at, bytes([byte[0] ^ 1]))
    assert client.fetch_blocks(keys, buffers(2), deadline=soon()).count == 1
    assert server.call("EXISTS", name) == 0
