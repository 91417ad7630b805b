"""Names of blocks of KV: a SHA-256 chain over a prompt's tokens (`kvstore.md` §2.2).

    h_0 = SHA-256("dikv" ‖ ns ‖ frame(salt) ‖ frame(adapter id))
    h_i = SHA-256(h_{i-1} ‖ u32le tokens of block i ‖ frame(extra_i))        frame(x) = u32le length ‖ x

Two requests share block i only if namespace, salt, every token before and inside it, and every other input
that changes KV (`extra`: images) agree. Pure bytes in, bytes out: no `hash()`, no process seed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np

BlockHash = NewType("BlockHash", bytes)
"""32 bytes."""

HASH_BYTES = 32
NAMESPACE_BYTES = 16
RUN_BLOCKS = 16
"""Blocks that share one run tag, and therefore one shard (`kvstore.md` §3.4)."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Names the KV of one full block of tokens, given everything before it.

    `depth` counts blocks from 0; `parent` is the hash of the block before it, or the chain's root.
    `run` is the first 8 bytes of the hash of block `16 * (depth // 16)` of the same chain.
    """

    hash: BlockHash
    parent: BlockHash
    depth: int
    run: bytes


def frame(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def chain_root(namespace: bytes, *, salt: bytes, adapter: bytes = b"") -> BlockHash:
    """h_0. `namespace` is 16 bytes. Raises ValueError on another length."""
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    return BlockHash(hashlib.sha256(b"dikv" + namespace + frame(salt) + frame(adapter)).digest())


def derive_block_hashes(
    token_ids: Sequence[int] | np.ndarray,
    *,
    root: BlockHash,
    block_tokens: int,
    extras: Mapping[int, bytes] | None = None,
) -> list[BlockHash]:
    """Hashes of the full blocks of `token_ids`, in order. `extras` maps a block's depth to its `extra` bytes."""
    packed = np.asarray(token_ids, dtype="<u4").tobytes()
    step = 4 * block_tokens
    hashes: list[BlockHash] = []
    parent: bytes = root
    for depth in range(len(packed) // step):
        extra = (extras or {}).get(depth, b"")
        parent = hashlib.sha256(parent + packed[depth * step : (depth + 1) * step] + frame(extra)).digest()
        hashes.append(BlockHash(parent))
    return hashes


def block_key(hashes: Sequence[BlockHash], depth: int, *, root: BlockHash) -> BlockKey:
    """Key of one block of a chain given the hashes from depth 0 up to it."""
    return BlockKey(
        hash=hashes[depth],
        parent=hashes[depth - 1] if depth else root,
        depth=depth,
        run=hashes[depth - depth % RUN_BLOCKS][:8],
    )


def block_keys(hashes: Sequence[BlockHash], *, root: BlockHash) -> list[BlockKey]:
    """Keys of a chain given its hashes from depth 0 on."""
    return [block_key(hashes, depth, root=root) for depth in range(len(hashes))]
