"""Ways to move the same blocks to and from one Redis server. Each is given the same keys, payloads and batches.

Every `get` leaves the payloads in memory that the contender can hand to an engine. `Ours` also writes and checks a
header and a checksum, which is part of what it is for; the others move bare values.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import redis
import xxhash

from whalepod.core.block_keys import RUN_BLOCKS, BlockKey, block_keys, chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.core.ids import Incarnation
from whalepod.kvstore.client import BlockToPut, KvClient
from whalepod.kvstore.resp import command
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import block_store_key
from whalepod.kvstore.value_format import HEADER_BYTES, BlockLayout, FormatId

NAMESPACE = bytes(16)
BLOCK_TOKENS = 256
CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Work:
    """The blocks to move: one chain, every payload `payload_bytes` of its own random bytes."""

    keys: Sequence[BlockKey]
    payloads: Sequence[bytes]

    @classmethod
    def of(cls, blocks: int, payloads: Sequence[bytes], *, salt: bytes = b"benchmark") -> Work:
        root = chain_root(NAMESPACE, salt=salt)
        hashes = derive_block_hashes(range(blocks * BLOCK_TOKENS), root=root, block_tokens=BLOCK_TOKENS)
        return cls(block_keys(hashes, root=root), payloads)

    @property
    def payload_bytes(self) -> int:
        return len(self.payloads[0])

    @property
    def names(self) -> list[bytes]:
        return [block_store_key(key) for key in self.keys]

    def batches(self, blocks: int = RUN_BLOCKS) -> list[slice]:
        return [slice(start, start + blocks) for start in range(0, len(self.keys), blocks)]


class Contender(Protocol):
    name: str

    def set(self) -> None:
        """Store every block. The server is empty before."""
        ...

    def get(self) -> None:
        """Read every block. All are there."""
        ...

    def close(self) -> None: ...


class Ours:
    """`KvClient`, as an engine calls it."""

    def __init__(self, address: StoreAddress, work: Work, *, connections: int) -> None:
        self.name = f"whalepod, {connections} connections"
        self._work = work
        layout = BlockLayout.from_layers(
            block_tokens=BLOCK_TOKENS, format_id=FormatId.RELEASE, global_kv={0: work.payload_bytes}, index_keys={}
        )
        settings = StoreSettings(addresses=(address,), data_connections=connections, data_timeout_s=CALL_S)
        self._client = KvClient(settings, namespace=NAMESPACE, layout=layout, incarnation=Incarnation(1))
        self._to_put = [BlockToPut(key, data, True) for key, data in zip(work.keys, work.payloads, strict=True)]
        self._buffers = [memoryview(bytearray(work.payload_bytes)) for _ in work.keys]

    def set(self) -> None:
        stored = self._client.put_blocks(self._to_put, deadline=Deadline.after(CALL_S))
        assert stored == len(self._to_put), stored

    def get(self) -> None:
        fetched = self._client.fetch_blocks(self._work.keys, self._buffers, deadline=Deadline.after(CALL_S))
        assert fetched.count == len(self._buffers), fetched.count

    def get_one(self, number: int) -> float:
        """Seconds of a read of one block."""
        start_s = time.perf_counter()
        fetched = self._client.fetch_blocks(
            [self._work.keys[number]], [self._buffers[number]], deadline=Deadline.after(CALL_S)
        )
        assert fetched.count == 1
        return time.perf_counter() - start_s

    def lost(self) -> str:
        """What a read does when one of its keys was evicted between probe and read."""
        fetched = self._client.fetch_blocks(self._work.keys, self._buffers, deadline=Deadline.after(CALL_S))
        return f"a miss from there on: {fetched.count} of {len(self._buffers)} blocks"

    def close(self) -> None:
        self._client.close()


class Raw:
    """The bound: commands encoded beforehand, every reply received into one buffer; not looked at, or hashed."""

    def __init__(
        self,
        address: StoreAddress,
        work: Work,
        *,
        connections: int,
        at_once: int = RUN_BLOCKS,
        hashed: bool = False,
        apart: bool = False,
    ) -> None:
        """`at_once`: commands sent before their replies are read. `hashed`: what is read is also hashed, once. `apart`:
        replies go to memory of their own, as an engine's must, and not again and again to what is in the processor's
        cache."""
        kind = "raw + xxh3" if hashed else "raw apart" if apart else "raw"
        self.name = f"{kind}, {at_once} at once, {connections} connections"
        self._hashed = hashed
        self._sockets = [_connected(address) for _ in range(connections)]
        self._executor = ThreadPoolExecutor(connections)
        header = bytes(HEADER_BYTES)
        values = [header + payload for payload in work.payloads]
        names, batches = work.names, work.batches(at_once)
        self._sets = [
            b"".join(command(b"SET", *pair) for pair in zip(names[batch], values[batch], strict=True))
            for batch in batches
        ]
        self._gets = [b"".join(command(b"GET", name) for name in names[batch]) for batch in batches]
        value_bytes = len(values[0])
        self._set_reply = at_once * len(b"+OK\r\n")
        self._get_reply = at_once * (len(b"$%d\r\n\r\n" % value_bytes) + value_bytes)
        self._buffers = [bytearray(self._get_reply) for _ in (batches if apart else self._sockets)]
        self._apart = apart

    def set(self) -> None:
        self._exchange(self._sets, self._set_reply)

    def get(self) -> None:
        self._exchange(self._gets, self._get_reply)

    def close(self) -> None:
        self._executor.shutdown()
        for connection in self._sockets:
            connection.close()

    def _exchange(self, requests: Sequence[bytes], reply_bytes: int) -> None:
        count = len(self._sockets)
        numbered = list(enumerate(requests))
        jobs = [self._executor.submit(self._talk, lane, numbered[lane::count], reply_bytes) for lane in range(count)]
        for job in jobs:
            job.result()

    def _talk(self, lane: int, requests: Sequence[tuple[int, bytes]], reply_bytes: int) -> None:
        connection = self._sockets[lane]
        for number, request in requests:
            view = memoryview(self._buffers[number if self._apart else lane])
            connection.sendall(request)
            received = connection.recv_into(view, reply_bytes, socket.MSG_WAITALL)
            assert received == reply_bytes, "the server answered otherwise"
            if self._hashed and reply_bytes == self._get_reply:
                xxhash.xxh3_64_intdigest(view)


class RedisPy:
    """redis-py with hiredis: pipelines of one batch, on one connection."""

    name = "redis-py + hiredis"

    def __init__(self, address: StoreAddress, work: Work) -> None:
        self._client = redis_client(address)
        self._work = work

    def set(self) -> None:
        for batch in self._work.batches():
            pipeline = self._client.pipeline(transaction=False)
            for name, payload in zip(self._work.names[batch], self._work.payloads[batch], strict=True):
                pipeline.set(name, payload, nx=True, px=86_400_000)
            assert all(cast("list[bool]", pipeline.execute()))

    def get(self) -> None:
        for batch in self._work.batches():
            pipeline = self._client.pipeline(transaction=False)
            for name in self._work.names[batch]:
                pipeline.get(name)
            assert all(cast("list[bytes]", pipeline.execute()))

    def lost(self) -> str:
        """What a read does when one of its keys was evicted between probe and read."""
        values = cast("list[bytes | None]", self._client.mget(self._work.names))
        return f"None for it, {sum(value is not None for value in values)} of {len(values)} blocks"

    def close(self) -> None:
        self._client.close()


class LmCache:
    """LMCache's native client, in its own process (`lmcache_peer.py`). It sets and gets bare values of its own."""

    def __init__(self, library: Path, address: StoreAddress, work: Work, *, workers: int) -> None:
        self.name = f"LMCache native, {workers} workers"
        peer = Path(__file__).with_name("lmcache_peer.py")
        command = [sys.executable, str(peer), str(library), address.host, str(address.port), str(workers)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        keys = [f"peer:{number}" for number in range(len(work.keys))]
        self.seconds = 0.0
        self._tell(json.dumps({"keys": keys, "bytes": work.payload_bytes, "batch": RUN_BLOCKS}))

    def set(self) -> None:
        self._ask("set")

    def get(self) -> None:
        self._ask("get")

    def lost(self) -> str:
        """What a read does when one of its keys was evicted between probe and read."""
        answer = self._answer("lost")
        return answer if isinstance(answer, str) else "returns as if it had been there"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, what: str) -> None:
        answer = self._answer(what)
        assert isinstance(answer, float), answer
        self.seconds = answer

    def _answer(self, what: str) -> float | str:
        assert self._process.stdout is not None
        self._tell(what)
        return json.loads(self._process.stdout.readline())

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def redis_client(address: StoreAddress) -> redis.Redis:
    return redis.Redis.from_url(f"unix://{address.path}" if address.path else f"redis://{address}")


def _connected(address: StoreAddress) -> socket.socket:
    if address.path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address.path)
        return connection
    connection = socket.create_connection((address.host, address.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
