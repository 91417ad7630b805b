"""The ranks' shared memory: leaf-first, whole prefixes, and no harm from a rank that dies in it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kvstore.conftest import OpenClient
from tests.kvstore.redis_server import RedisServer
from tests.kvstore.test_store_faults import seconds_of
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of, snapshot, soon, to_put
from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.node_cache import NodeCache
from whalepod.kvstore.plain_block_headers import PlainBlockHeaders
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.value_sinks import WantedBlocks

OpenCache = Callable[..., NodeCache]


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[OpenCache]:
    opened: list[NodeCache] = []

    def open_(blocks: int = 8) -> NodeCache:
        opened.append(_cache(tmp_path, blocks))
        return opened[-1]

    yield open_
    for cache in opened:
        cache.close()


def _cache(folder: Path, blocks: int) -> NodeCache:
    size = LAYOUT.payload_bytes
    return NodeCache(folder, namespace=NAMESPACE, payload_bytes=size, bytes_max=blocks * size, clock=SYSTEM_CLOCK)


def put(cache: NodeCache, keys: list[BlockKey], *, exact: bool = True) -> None:
    cache.put([(key.hash, key.parent, exact, (memoryview(payload_of(key)),)) for key in keys])


def held(cache: NodeCache, keys: list[BlockKey], *, exact_only: bool = False) -> int:
    """Leading blocks there, each of which must hold the right bytes."""
    blocks = WantedBlocks(keys, buffers(len(keys)), PlainBlockHeaders(NAMESPACE, LAYOUT), exact_only=exact_only)
    cache.read(blocks)
    count = blocks.verified
    assert not any(blocks.verdicts[count:])
    assert [bytes(buffer) for buffer in blocks.buffers[:count]] == [payload_of(key) for key in keys[:count]]
    return count


def test_what_one_rank_keeps_another_reads(open_cache: OpenCache) -> None:
    one, other = open_cache(40), open_cache(40)
    keys = chain(33)
    put(one, keys)
    assert held(other, keys) == 33
    assert held(other, chain(3, salt=b"x")) == 0


def test_a_prefix_shrinks_from_its_end_and_the_longest_unused_goes_first(open_cache: OpenCache) -> None:
    cache = open_cache(8)
    old, new = chain(5, salt=b"old"), chain(3, salt=b"new")
    put(cache, old)
    put(cache, new)
    assert held(cache, new) == 3
    put(cache, chain(2, salt=b"third"))
    assert (held(cache, old), held(cache, new)) == (3, 3)
    put(cache, chain(2, salt=b"fourth"))
    assert held(cache, new) == 3
    assert held(cache, old) <= 3


def test_a_prefix_longer_than_the_cache_keeps_its_beginning(open_cache: OpenCache) -> None:
    cache = open_cache(8)
    keys = chain(40)
    put(cache, keys)
    assert held(cache, keys) == 8


def test_only_exact_blocks_are_given_to_who_asks_for_them_and_replace_others(open_cache: OpenCache) -> None:
    cache = open_cache(8)
    keys = chain(4)
    put(cache, keys, exact=False)
    assert (held(cache, keys, exact_only=True), held(cache, keys)) == (0, 4)
    put(cache, keys[:2], exact=True)
    assert (held(cache, keys, exact_only=True), held(cache, keys)) == (2, 4)


def test_a_purge_drops_everything_once(open_cache: OpenCache) -> None:
    cache = open_cache(8)
    put(cache, chain(4))
    cache.purge(7)
    assert held(cache, chain(4)) == 0
    put(cache, chain(4))
    open_cache(8).purge(7)
    assert held(cache, chain(4)) == 4


def test_blocks_come_and_go_for_long_without_a_wrong_byte_or_a_lost_slot(open_cache: OpenCache) -> None:
    cache = open_cache(16)
    for number in range(200):
        keys = chain(1 + number % 7, salt=bytes([number % 40]))
        put(cache, keys)
        assert held(cache, keys) == len(keys)
    put(cache, chain(16, salt=b"all"))
    assert held(cache, chain(16, salt=b"all")) == 16


def test_a_damaged_block_is_a_miss_and_is_dropped(open_cache: OpenCache, tmp_path: Path) -> None:
    cache = open_cache(4)
    keys = chain(2)
    put(cache, keys)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    at = data.index(payload_of(keys[1]))
    with path.open("r+b") as file:
        file.seek(at + 17)
        file.write(bytes([data[at + 17] ^ 1]))
    assert held(cache, keys) == 1
    put(cache, keys)
    assert held(cache, keys) == 2


def test_a_segment_of_another_shape_is_made_anew(open_cache: OpenCache, tmp_path: Path) -> None:
    (tmp_path / f"whalepod-blocks-{NAMESPACE.hex()}").write_bytes(b"something else")
    cache = open_cache(4)
    put(cache, chain(2))
    assert held(cache, chain(2)) == 2


def test_a_rank_killed_inside_neither_wedges_nor_spoils_the_cache(open_cache: OpenCache, tmp_path: Path) -> None:
    cache = open_cache(16)
    keys = chain(4)
    put(cache, keys)
    command = [sys.executable, "-c", DIE_INSIDE, str(tmp_path), NAMESPACE.hex(), str(LAYOUT.payload_bytes)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"inside\n"
        assert seconds_of(lambda: held(cache, keys)) < 1, "a lock that is held is a miss, not a wait"
        victim.kill()
        victim.wait()
    assert held(cache, keys) == 4
    put(cache, chain(6))
    assert held(cache, chain(6)) == 6


DIE_INSIDE = """
import sys, threading
from pathlib import Path
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.kvstore.node_segment import NodeSegment
folder, namespace, size = sys.argv[1:]
path = Path(folder) / f"whalepod-blocks-{namespace}"
segment = NodeSegment(
    path, namespace=bytes.fromhex(namespace), slots=16, payload_bytes=int(size), clock=SYSTEM_CLOCK
)
with segment.locked():
    segment.table[:] = 0
    segment.payload(15)[:] = b"?" * int(size)
    sys.stdout.write("inside\\n")
    sys.stdout.flush()
    threading.Event().wait(60)
"""
"""Stops in the middle of a write, with the lock held and the tables in disorder."""


def test_a_client_reads_from_the_cache_what_the_store_has_lost(open_cache: OpenCache, server: RedisServer) -> None:
    settings = StoreSettings(addresses=(server.address,))
    shared = {"namespace": NAMESPACE, "layout": LAYOUT}
    one = KvClient(settings, incarnation=Incarnation(1), cache=open_cache(40), **shared)  # type: ignore[arg-type]
    other = KvClient(settings, incarnation=Incarnation(2), cache=open_cache(40), **shared)  # type: ignore[arg-type]
    keys = chain(20)
    assert one.put_blocks(to_put(keys), deadline=soon()) == 20
    server.call("FLUSHALL")
    assert other.fetch_blocks(keys, buffers(20), deadline=soon()).count == 20
    one.close()
    other.close()
    assert other.fetch_blocks(keys, buffers(20), deadline=soon()).count == 0


def test_what_a_client_fetched_is_in_the_cache(
    open_cache: OpenCache, server: RedisServer, open_client: OpenClient
) -> None:
    keys = chain(20)
    open_client(server.address).put_blocks(to_put(keys), deadline=soon())
    cache = open_cache(40)
    reader = KvClient(
        StoreSettings(addresses=(server.address,)),
        namespace=NAMESPACE,
        layout=LAYOUT,
        incarnation=Incarnation(3),
        cache=cache,
    )
    assert reader.fetch_blocks(keys, buffers(20), deadline=soon()).count == 20
    assert held(cache, keys) == 20
    assert snapshot().boundary_tokens
    reader.close()
