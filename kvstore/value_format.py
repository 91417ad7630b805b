"""The bytes of one stored value: a 256-byte header and a payload, little-endian (`kvstore.md` §3.2).

    writer: parts ──▶ encode_header ──▶ [header, part, part, …]        with a MAC: [header, extension, part, …]
    reader: 256 bytes ──▶ parse_header ──▶ Header.check_* ──▶ payload into place ──▶ Header.payload_refusal

Bytes from the store are untrusted input: every function here that reads them is total. It returns a `Refusal`, which is
a reason for a miss, and never raises; and it decides before anything is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag

import google_crc32c
import xxhash

from whalepod.core.block_keys import BlockKey

MAGIC = b"DIKV"
VERSION = 1
HEADER_BYTES = 256
EXTENSION_BYTES = 64
"""Follows the header of a value with a MAC: the MAC, then zeros. The header's length counts it."""
PARTS_MAX = 8
ALL_LAYERS = 255
"""Layer of a part that holds one kind for every layer, layers ascending."""

BytesLike = bytes | bytearray | memoryview

_FIXED = struct.Struct("<4sHHIHH16s32s32sIIQQQQQIHH")
_PART = struct.Struct("<BBHII")
_CHECKSUM = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_PARTS_AT = 152
_RESERVED_AT = 248
_CHECKSUM_AT = 112
_CRC_AT = 252
assert _FIXED.size == _PARTS_AT
assert _PARTS_AT + PARTS_MAX * _PART.size == _RESERVED_AT


class Flag(IntFlag):
    """Bits of the header's flags that this version reads. Any other bit refuses the value."""

    EXACT = 1
    """Every row came from a chain that never passed through an approximate replay (`kvstore.md` §1.2)."""
    CRC32C = 2
    """The payload's checksum is CRC-32C instead of xxh3-64."""
    MAC = 16
    """An extension with a MAC follows the header (`value_mac.py`); the payload's checksum covers it too."""


FLAGS_KNOWN = int(Flag.EXACT | Flag.CRC32C | Flag.MAC)


class ValueClass(IntEnum):
    BLOCK = 1
    SNAPSHOT = 3
    """`kvstore.md` calls it tail; its 2, 4 and 5 are parts of a snapshot here or are not built."""


class PartKind(IntEnum):
    GLOBAL_KV = 1
    INDEX_KEYS = 2
    WINDOW_ROWS = 3
    DRAFT_ROWS = 4
    GROUP_STATE = 5
    """Raw pooled projections and gate scores of unfinished groups."""
    STATE = 6
    """Small sequence state: next token, sampling position."""


class FormatId(IntEnum):
    """Record formats of a value's parts. The names and widths behind each are the model's."""

    RELEASE = 1
    """FP8 window rows, FP4 global rows, MXFP4 index keys, with their scales."""
    FLOAT32 = 2
    BFLOAT16 = 3


class Refusal(Enum):
    """Why a value was not used. Each is a miss."""

    LENGTH = "length"
    MAGIC = "magic"
    HEADER_CHECKSUM = "header_checksum"
    VERSION = "version"
    HEADER_LENGTH = "header_length"
    FLAGS = "flags"
    RESERVED = "reserved"
    PARTS = "parts"
    CLASS = "class"
    FORMAT = "format"
    NAMESPACE = "namespace"
    IDENTITY = "identity"
    CHECKSUM = "checksum"
    MAC = "mac"
    """Not signed with this cluster's key, where that is asked for."""
    NOT_EXACT = "not_exact"

    @property
    def is_foreign(self) -> bool:
        """A newer peer may own this value: leave it alone."""
        return self in _FOREIGN

    @property
    def is_corrupt(self) -> bool:
        """The bytes are wrong for everyone: delete them if they are still there."""
        return self not in _FOREIGN and self is not Refusal.NOT_EXACT


_FOREIGN = frozenset({Refusal.VERSION, Refusal.HEADER_LENGTH, Refusal.FLAGS, Refusal.FORMAT})


@dataclass(frozen=True, slots=True)
class Part:
    """One checked byte range of the payload. Parts follow each other without gaps and cover the payload."""

    kind: int
    layer: int
    offset_bytes: int
    bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What a block of this model looks like: the only part table a reader accepts.

    Raises ValueError if there are no parts or more than 8, or if they do not follow each other from offset 0.
    """

    block_tokens: int
    format_id: int
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("a block has at least one part")
        _packed_parts(self.parts)

    @property
    def payload_bytes(self) -> int:
        return self.parts[-1].offset_bytes + self.parts[-1].bytes

    @classmethod
    def from_layers(
        cls, *, block_tokens: int, format_id: int, global_kv: Mapping[int, int], index_keys: Mapping[int, int]
    ) -> BlockLayout:
        """Canonical order (§3.3): global KV of each source, then index keys of each, layers ascending.

        Both mappings go from layer to bytes. More than 8 sources share one part a kind, same order.
        """
        sized = [(PartKind.GLOBAL_KV, layer, global_kv[layer]) for layer in sorted(global_kv)]
        sized += [(PartKind.INDEX_KEYS, layer, index_keys[layer]) for layer in sorted(index_keys)]
        if len(sized) > PARTS_MAX:
            kinds = ((PartKind.GLOBAL_KV, global_kv), (PartKind.INDEX_KEYS, index_keys))
            sized = [(kind, ALL_LAYERS, sum(layers.values())) for kind, layers in kinds if layers]
        return cls(block_tokens=block_tokens, format_id=format_id, parts=place_parts(sized))


@dataclass(frozen=True, slots=True)
class SnapshotValue:
    """Window rows and small state of one sequence at one boundary (`design.md` §4).

    `parts` maps a kind to its bytes; what the bytes mean is the engine's. A value that was read owns its memory: each
    part is a separate, aligned buffer.
    """

    boundary_tokens: int
    mode: int
    """The engine's stamp, 16 bits: kind of snapshot and truncation mode. A reader compares it before using any part."""
    parts: Mapping[PartKind, BytesLike]
    valid_from: int = 0
    """First position whose window rows are present."""
    exact: bool = True
    draft_fingerprint: int = 0
    """64 bits; 0: no draft rows."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header's fields. Integers are in the ranges of their widths; nothing else is implied until `check_*` said
    so."""

    value_class: int
    format_id: int
    namespace: bytes
    identity: bytes
    """32 bytes: the block's hash, or `snapshot_identity` of the snapshot's key."""
    payload_bytes: int
    checksum: int
    parts: tuple[Part, ...]
    flags: int = 0
    parent: bytes = bytes(32)
    depth_blocks: int = 0
    tokens: int = 0
    """A block's tokens; a snapshot's boundary."""
    writer: int = 0
    created_unix_ms: int = 0
    draft_fingerprint: int = 0
    """Of a snapshot. In a block the same 8 bytes tell on whose account it is stored."""
    valid_from: int = 0
    mode: int = 0

    @property
    def exact(self) -> bool:
        return self.flags & 1 == 1

    @property
    def header_bytes(self) -> int:
        """Of header and extension."""
        return header_bytes_of(self.flags)

    def block_refusal(
        self, key: BlockKey, *, namespace: bytes, layout: BlockLayout, value_bytes: int, exact_only: bool = False
    ) -> Refusal | None:
        """None if this can be the header of `key`'s block in a value of `value_bytes`."""
        if self.value_class != ValueClass.BLOCK:
            return Refusal.CLASS
        if refusal := self._common_refusal(namespace, layout.format_id, key.hash, value_bytes):
            return refusal
        if self.parent != key.parent or self.depth_blocks != key.depth or self.tokens != layout.block_tokens:
            return Refusal.IDENTITY
        if self.parts != layout.parts:
            return Refusal.PARTS
        if exact_only and not self.exact:
            return Refusal.NOT_EXACT
        return None

    def snapshot_refusal(
        self, identity: bytes, *, namespace: bytes, format_id: int, value_bytes: int, value_bytes_max: int
    ) -> Refusal | None:
        """None if this can be the header of the snapshot named `identity` in a value of `value_bytes`."""
        if self.value_class != ValueClass.SNAPSHOT:
            return Refusal.CLASS
        if value_bytes > value_bytes_max:
            return Refusal.LENGTH
        if refusal := self._common_refusal(namespace, format_id, identity, value_bytes):
            return refusal
        kinds = [part.kind for part in self.parts]
        if len(set(kinds)) != len(kinds):
            return Refusal.PARTS
        return None if set(kinds) <= set(PartKind) else Refusal.FORMAT

    def payload_refusal(self, payload: Iterable[BytesLike]) -> Refusal | None:
        """None if all that follows the 256 bytes, given in pieces, has this header's checksum."""
        crc = bool(self.flags & Flag.CRC32C)
        return None if payload_checksum(payload, crc=crc) == self.checksum else Refusal.CHECKSUM

    def _common_refusal(self, namespace: bytes, format_id: int, identity: bytes, value_bytes: int) -> Refusal | None:
        if self.namespace != namespace:
            return Refusal.NAMESPACE
        if self.format_id != format_id:
            return Refusal.FORMAT
        if self.identity != identity:
            return Refusal.IDENTITY
        return None if value_bytes == self.header_bytes + self.payload_bytes else Refusal.LENGTH


def place_parts(sized: Iterable[tuple[int, int, int]]) -> tuple[Part, ...]:
    """(kind, layer, bytes) one after the other, from offset 0."""
    parts: list[Part] = []
    offset = 0
    for kind, layer, size in sized:
        parts.append(Part(kind=int(kind), layer=layer, offset_bytes=offset, bytes=size))
        offset += size
    return tuple(parts)


def flat(data: BytesLike) -> memoryview:
    """One-dimensional bytes, so that `len` counts bytes."""
    view = data if isinstance(data, memoryview) else memoryview(data)
    return view if view.ndim == 1 and view.format == "B" and view.c_contiguous else view.cast("B")


def header_bytes_of(flags: int) -> int:
    return HEADER_BYTES + (EXTENSION_BYTES if flags & Flag.MAC else 0)


def payload_checksum(payload: Iterable[BytesLike], *, crc: bool = False) -> int:
    """xxh3-64, or CRC-32C, of the pieces' concatenation."""
    if crc:
        value = 0
        for piece in payload:
            value = google_crc32c.extend(value, bytes(piece))
        return value
    pieces = tuple(payload)
    if len(pieces) == 1:
        return xxhash.xxh3_64_intdigest(pieces[0])
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def encode_header(header: Header) -> bytes:
    """256 bytes. Raises ValueError if the parts do not cover the payload, struct.error if a field is out of range."""
    covered = header.parts[-1].offset_bytes + header.parts[-1].bytes if header.parts else 0
    if covered != header.payload_bytes:
        raise ValueError(f"the parts cover {covered} of {header.payload_bytes} payload bytes")
    if len(header.namespace) != 16 or len(header.identity) != 32 or len(header.parent) != 32:
        raise ValueError("a namespace has 16 bytes, an identity and a parent have 32")
    fixed = _FIXED.pack(
        MAGIC, VERSION, header.header_bytes, header.flags, header.value_class, header.format_id,
        header.namespace, header.identity, header.parent, header.depth_blocks, header.tokens,
        header.payload_bytes, header.checksum, header.writer, header.created_unix_ms,
        header.draft_fingerprint, header.valid_from, len(header.parts), header.mode,
    )  # fmt: skip
    body = (fixed + _packed_parts(header.parts)).ljust(_CRC_AT, b"\0")
    return body + _CRC.pack(google_crc32c.value(body))


def with_checksums(head: bytes, checksum: int) -> bytes:
    """The header `head`, whose two checksums do not matter, with the payload's and its own."""
    body = head[:_CHECKSUM_AT] + _CHECKSUM.pack(checksum) + head[_CHECKSUM_AT + _CHECKSUM.size : _CRC_AT]
    return body + _CRC.pack(google_crc32c.value(body))


def parse_header(data: BytesLike) -> Header | Refusal:
    """Total: any bytes give a header or the first reason against one. Only the first 256 bytes are looked at."""
    raw = bytes(data[:HEADER_BYTES])
    if len(raw) < HEADER_BYTES:
        return Refusal.LENGTH
    if raw[:4] != MAGIC:
        return Refusal.MAGIC
    if google_crc32c.value(raw[:_CRC_AT]) != _CRC.unpack_from(raw, _CRC_AT)[0]:
        return Refusal.HEADER_CHECKSUM
    (
        _, version, header_bytes, flags, value_class, format_id, namespace, identity, parent, depth, tokens,
        payload_bytes, checksum, writer, created, draft, valid_from, part_count, mode,
    ) = _FIXED.unpack_from(raw)  # fmt: skip
    if version != VERSION:
        return Refusal.VERSION
    if flags & ~FLAGS_KNOWN:
        return Refusal.FLAGS
    if header_bytes != header_bytes_of(flags):  # a longer header carries an extension, and each has its flag
        return Refusal.HEADER_LENGTH
    if any(raw[_RESERVED_AT:_CRC_AT]):
        return Refusal.RESERVED
    parts = _parsed_parts(raw, part_count, payload_bytes)
    if isinstance(parts, Refusal):
        return parts
    return Header(
        value_class=value_class, format_id=format_id, namespace=namespace, identity=identity, parent=parent,
        payload_bytes=payload_bytes, checksum=checksum, parts=parts, flags=flags, depth_blocks=depth, tokens=tokens,
        writer=writer, created_unix_ms=created, draft_fingerprint=draft, valid_from=valid_from, mode=mode,
    )  # fmt: skip


def _parsed_parts(raw: bytes, count: int, payload_bytes: int) -> tuple[Part, ...] | Refusal:
    if count > PARTS_MAX:
        return Refusal.PARTS
    if any(raw[_PARTS_AT + count * _PART.size : _RESERVED_AT]):
        return Refusal.RESERVED
    parts: list[Part] = []
    covered = 0
    for index in range(count):
        kind, layer, reserved, offset, size = _PART.unpack_from(raw, _PARTS_AT + index * _PART.size)
        if reserved:
            return Refusal.RESERVED
        if offset != covered:
            return Refusal.PARTS
        covered += size
        parts.append(Part(kind=kind, layer=layer, offset_bytes=offset, bytes=size))
    return tuple(parts) if covered == payload_bytes else Refusal.PARTS


def _packed_parts(parts: Sequence[Part]) -> bytes:
    if len(parts) > PARTS_MAX:
        raise ValueError(f"a value has at most {PARTS_MAX} parts, not {len(parts)}")
    packed = b""
    covered = 0
    for part in parts:
        if part.offset_bytes != covered:
            raise ValueError(f"part {part} should start at {covered}")
        covered += part.bytes
        packed += _PART.pack(part.kind, part.layer, 0, part.offset_bytes, part.bytes)
    return packed
