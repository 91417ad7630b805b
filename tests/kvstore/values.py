"""Chains of blocks, payloads and snapshots for the store's tests."""

from __future__ import annotations

import random

from whalepod.core.block_keys import BlockKey, block_keys, chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.kvstore.client import BlockToPut
from whalepod.kvstore.value_format import BlockLayout, FormatId, PartKind, SnapshotValue

NAMESPACE = bytes(range(16))
LAYOUT = BlockLayout.from_layers(
    block_tokens=16, format_id=FormatId.FLOAT32, global_kv={2: 3000, 5: 1500}, index_keys={2: 500}
)


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds)


def chain(blocks: int, *, salt: bytes = b"") -> list[BlockKey]:
    root = chain_root(NAMESPACE, salt=salt)
    token_ids = range(blocks * LAYOUT.block_tokens)
    return block_keys(derive_block_hashes(token_ids, root=root, block_tokens=LAYOUT.block_tokens), root=root)


def payload_of(key: BlockKey, *, writer: int = 0) -> bytes:
    """Bytes that depend on the block and on who computed it."""
    return random.Random(key.hash + bytes([writer])).randbytes(LAYOUT.payload_bytes)


def to_put(keys: list[BlockKey], *, exact: bool = True, writer: int = 0) -> list[BlockToPut]:
    return [BlockToPut(key, payload_of(key, writer=writer), exact) for key in keys]


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in range(count)]


def snapshot(*, boundary_tokens: int = 37) -> SnapshotValue:
    return SnapshotValue(
        boundary_tokens=boundary_tokens,
        mode=0x0102,
        parts={
            PartKind.STATE: b"next token",
            PartKind.WINDOW_ROWS: bytes(range(256)) * 40,
            PartKind.DRAFT_ROWS: b"d" * 321,
        },
        valid_from=9,
        exact=True,
        draft_fingerprint=77,
    )
