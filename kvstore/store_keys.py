"""Names of values in Redis (`kvstore.md` §3.4).

The text in braces is the tag that decides the shard, here and in a Redis Cluster: 16 blocks of a run and the snapshots
at their borders live together, different runs spread out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

from whalepod.core.block_keys import BlockKey
from whalepod.core.ids import RequestId


def block_store_key(key: BlockKey) -> bytes:
    return _run_prefix(key.run) + key.hash


def block_store_keys(keys: Sequence[BlockKey]) -> list[bytes]:
    """All of one length."""
    return [_run_prefix(key.run) + key.hash for key in keys]


@lru_cache(maxsize=256)
def _run_prefix(run: bytes) -> bytes:
    """Of 16 neighbours, who are mostly asked for together."""
    return b"b:{%b}:" % run.hex().encode()


def turn_snapshot_key(key: BlockKey, *, mode: int) -> bytes:
    """Name of the snapshot at the end of `key`'s block. `mode` is the snapshot's 16-bit stamp."""
    return b"t:{" + key.run.hex().encode() + b"}:" + key.hash + mode.to_bytes(2, "little")


def handoff_snapshot_key(request_id: RequestId, attempt: int) -> bytes:
    """Name of what a prefill rank leaves for the decode rank of the same attempt."""
    return b"h:{" + request_id.hex().encode() + b"-%d}:t" % attempt


def crash_snapshot_key(request_id: RequestId, key: BlockKey) -> bytes:
    """Name of what a request leaves at the end of `key`'s block, in case its rank dies. A rank that goes on from other
    tokens, or without knowing the tenant's salt, has another name for it."""
    return b"c:{" + request_id.hex().encode() + b"}:" + key.hash


def span_key(rows_name: bytes) -> bytes:
    """Name of an image's rows. Whose weights made them, the value's namespace says."""
    return b"e:{" + rows_name[:8].hex().encode() + b"}:" + rows_name


def owner_tag(tenant: str) -> int:
    """64 bits that stand for a tenant in the headers of its blocks: who pays for them, and what a purge removes."""
    return int.from_bytes(hashlib.sha256(b"whalepod owner" + tenant.encode()).digest()[:8], "little") or 1


def shard_tag(store_key: bytes) -> bytes:
    """What is between the first `{` and the next `}`, as in Redis Cluster; the whole key if there is nothing."""
    start = store_key.find(b"{")
    end = store_key.find(b"}", start + 1)
    return store_key[start + 1 : end] if start >= 0 and end > start + 1 else store_key


def snapshot_identity(store_key: bytes) -> bytes:
    """32 bytes that a snapshot's header repeats, so that a value under another's key is noticed."""
    return hashlib.sha256(store_key).digest()
