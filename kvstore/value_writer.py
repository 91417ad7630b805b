"""Builds values to write: header, payload pieces as they lie in memory, and how long the store should keep them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import Clock
from whalepod.core.ids import Incarnation

from .columns import rows
from .native_writes import Drafts
from .plain_block_headers import PlainBlockHeaders
from .settings import StoreSettings
from .store_keys import block_store_key, block_store_keys, snapshot_identity
from .transport import ValueToWrite
from .value_format import (
    ALL_LAYERS,
    BlockLayout,
    BytesLike,
    Flag,
    Header,
    SnapshotValue,
    ValueClass,
    encode_header,
    flat,
    place_parts,
)
from .value_mac import ValueMac


@dataclass(frozen=True, slots=True)
class BlockToPut:
    """A block and its payload, in one piece or in pieces that follow each other; `layout.payload_bytes` in total."""

    key: BlockKey
    payload: BytesLike | Sequence[BytesLike]
    exact: bool
    owner: int = 0
    """64 bits that say on whose account it is stored (`store_keys.owner_tag`); 0: nobody's."""


@dataclass(frozen=True, slots=True)
class ValueWriter:
    """Stamps values with this process's namespace, layout and incarnation."""

    namespace: bytes
    layout: BlockLayout
    incarnation: Incarnation
    settings: StoreSettings
    clock: Clock
    mac: ValueMac | None = None
    headers: PlainBlockHeaders = field(init=False)
    block_bytes: int = field(init=False)
    """Of a block's value."""

    def __post_init__(self) -> None:
        headers = PlainBlockHeaders(self.namespace, self.layout, signed=self.mac is not None)
        object.__setattr__(self, "headers", headers)
        object.__setattr__(self, "block_bytes", headers.header_bytes + self.layout.payload_bytes)

    def block(self, key: BlockKey, payload: tuple[BytesLike, ...], *, exact: bool, owner: int = 0) -> ValueToWrite:
        """`payload`: pieces of flat bytes, `layout.payload_bytes` in total, which are read when the value is sent."""
        return ValueToWrite.drafted(
            block_store_key(key),
            self.heads([(key, exact, owner)]),
            payload,
            life_ms=self.settings.block_life_ms(key.depth),
            value_bytes=self.block_bytes,
            mac=self.mac,
        )

    def heads(self, blocks: Iterable[tuple[BlockKey, bool, int]]) -> bytes:
        """Drafts of headers, see `PlainBlockHeaders.drafts`."""
        return self.headers.drafts(blocks, writer=self.incarnation, created_unix_ms=self.clock.unix_ms())

    def snapshot(self, key: bytes, value: SnapshotValue, *, life_ms: int) -> ValueToWrite:
        """Parts follow each other in the order of their kinds."""
        parts = {kind: flat(value.parts[kind]) for kind in sorted(value.parts)}
        header = Header(
            value_class=ValueClass.SNAPSHOT,
            format_id=self.layout.format_id,
            namespace=self.namespace,
            identity=snapshot_identity(key),
            payload_bytes=sum(map(len, parts.values())),
            checksum=0,
            parts=place_parts((kind, ALL_LAYERS, len(data)) for kind, data in parts.items()),
            flags=(Flag.EXACT if value.exact else 0) | (Flag.MAC if self.mac is not None else 0),
            depth_blocks=value.boundary_tokens // self.layout.block_tokens,
            tokens=value.boundary_tokens,
            writer=self.incarnation,
            created_unix_ms=self.clock.unix_ms(),
            draft_fingerprint=value.draft_fingerprint,
            valid_from=value.valid_from,
            mode=value.mode,
        )
        return ValueToWrite.drafted(
            key,
            encode_header(header),
            tuple(parts.values()),
            life_ms=life_ms,
            value_bytes=header.header_bytes + header.payload_bytes,
            mac=self.mac,
        )


class BlocksToWrite:
    """Blocks to be stored, in columns; values are made of them one by one only for who asks."""

    __slots__ = ("_blocks", "_made", "_writer", "keys", "lives_ms", "value_bytes")

    def __init__(self, writer: ValueWriter, blocks: Sequence[BlockToPut]) -> None:
        """Their payloads have been checked, and are read when they are sent."""
        self._writer = writer
        self._blocks = blocks
        self._made: dict[int, ValueToWrite] = {}
        self.keys = block_store_keys([block.key for block in blocks])
        self.lives_ms = writer.settings.block_lives_ms([block.key.depth for block in blocks])
        self.value_bytes = writer.block_bytes

    @property
    def can_spread(self) -> bool:
        return self._writer.mac is None

    def __getitem__(self, item: int) -> ValueToWrite:
        """The same each time."""
        if item not in self._made:
            block = self._blocks[item]
            pieces = flat_pieces(block.payload)
            self._made[item] = self._writer.block(block.key, pieces, exact=block.exact, owner=block.owner)
        return self._made[item]

    def drafts(self, items: Sequence[int]) -> Drafts | None:
        blocks = rows(self._blocks, items)
        payloads = [block.payload for block in blocks]
        if self._writer.mac is not None or not all(isinstance(payload, _ONE_PIECE) for payload in payloads):
            return None
        stamp = not self._made
        if stamp:
            heads = self._writer.heads([(block.key, block.exact, block.owner) for block in blocks])
        else:
            heads = b"".join([self[item].pieces[0] for item in items])
        return Drafts(heads, cast("list[BytesLike]", payloads), self._writer.layout.payload_bytes, stamp=stamp)


_ONE_PIECE = (memoryview, bytes, bytearray)


def check_payloads(blocks: Sequence[BlockToPut], *, payload_bytes: int) -> None:
    """Raises ValueError on a payload of another size, or one that is not runs of bytes."""
    for block in blocks:
        if _bytes_of(block.payload) != payload_bytes:
            raise ValueError(f"a block's payload has {payload_bytes} bytes, in runs without gaps")


def _bytes_of(payload: BytesLike | Sequence[BytesLike]) -> int:
    """-1: not runs of bytes."""
    if isinstance(payload, memoryview):
        return payload.nbytes if payload.c_contiguous else -1
    if isinstance(payload, bytes | bytearray):
        return len(payload)
    sizes = [_bytes_of(piece) for piece in payload]
    return -1 if -1 in sizes else sum(sizes)


def flat_pieces(payload: BytesLike | Sequence[BytesLike]) -> tuple[memoryview, ...]:
    if isinstance(payload, bytes | bytearray | memoryview):
        return (flat(cast("BytesLike", payload)),)
    return tuple(flat(piece) for piece in payload)
