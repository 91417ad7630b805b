"""Reads and writes the headers of blocks quickly: most are as foreseen in every field but checksum, writer, time, owner
and `exact`.

A fetch of 16 blocks has 16 headers to judge while the next payload waits in the socket, so the common case is a few
comparisons of bytes. Anything else, right or wrong, is for `parse_header` and `Header.block_refusal` to say.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import google_crc32c

from whalepod.core.block_keys import BlockKey

from .value_format import MAGIC, VERSION, BlockLayout, Flag, Header, ValueClass, encode_header, header_bytes_of

# Offsets of the header's fields, `kvstore.md` §3.2.
CLASS_AT = 12
IDENTITY_AT = 32
CHECKSUM_AT = 112
VALID_FROM_AT = 144
HEADER_CHECKSUM_AT = 252

_IDENTITY = struct.Struct("<32s32sI")
_SIZES = struct.Struct("<IQ")
_STAMPS = struct.Struct("<QQQQ")
_CHECKSUM = struct.Struct("<Q")
_HEADER_CHECKSUM = struct.Struct("<I")
_NO_CHECKSUM = bytes(_HEADER_CHECKSUM.size)


@dataclass(frozen=True, slots=True)
class PlainBlockHeaders:
    """What the headers of one namespace's blocks have in common."""

    namespace: bytes
    layout: BlockLayout
    signed: bool = False
    """They carry a MAC."""
    _start: bytes = field(init=False)
    _exact: Mapping[bytes, bool] = field(init=False)
    _starts: Mapping[bool, bytes] = field(init=False)
    """All before the identity, by whether a block is exact."""
    _before_identity: bytes = field(init=False)
    _sizes: bytes = field(init=False)
    """Behind the identity: tokens and payload bytes."""
    _after_owner: bytes = field(init=False)
    plain: bytes = field(init=False)
    """256 bytes: a block's header with the flag for exact, identity, checksums, writer, time and owner 0."""
    header_bytes: int = field(init=False)
    """Of header and extension."""

    def __post_init__(self) -> None:
        flags = Flag.MAC if self.signed else 0
        object.__setattr__(self, "header_bytes", header_bytes_of(flags))
        object.__setattr__(self, "_start", MAGIC + struct.pack("<HH", VERSION, self.header_bytes))
        exact_of = {struct.pack("<I", flags): False, struct.pack("<I", flags | Flag.EXACT): True}
        object.__setattr__(self, "_exact", exact_of)
        header = Header(
            value_class=ValueClass.BLOCK,
            format_id=self.layout.format_id,
            namespace=self.namespace,
            identity=bytes(32),
            payload_bytes=self.layout.payload_bytes,
            checksum=0,
            parts=self.layout.parts,
        )
        raw = encode_header(header)
        object.__setattr__(self, "_before_identity", raw[CLASS_AT:IDENTITY_AT])
        starts = {exact: self._start + packed + self._before_identity for packed, exact in exact_of.items()}
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_sizes", _SIZES.pack(self.layout.block_tokens, self.layout.payload_bytes))
        object.__setattr__(self, "_after_owner", raw[VALID_FROM_AT:HEADER_CHECKSUM_AT])
        plain = (
            starts[False],
            bytes(_IDENTITY.size),
            self._sizes,
            bytes(_STAMPS.size),
            self._after_owner,
            _NO_CHECKSUM,
        )
        object.__setattr__(self, "plain", b"".join(plain))

    def read(self, head: bytes, key: BlockKey, *, value_bytes: int) -> tuple[int, bool] | None:
        """The payload's xxh3-64 checksum and whether the block is exact; None if this is no plain header of `key`'s."""
        exact = self._exact.get(head[8:CLASS_AT])
        plain = (
            exact is not None
            and value_bytes == self.header_bytes + self.layout.payload_bytes
            and head[:8] == self._start
            and head[CLASS_AT:CHECKSUM_AT] == self._before_identity + identities_of((key,)) + self._sizes
            and head[VALID_FROM_AT:HEADER_CHECKSUM_AT] == self._after_owner
            and google_crc32c.value(head[:HEADER_CHECKSUM_AT])
            == _HEADER_CHECKSUM.unpack_from(head, HEADER_CHECKSUM_AT)[0]
        )
        return (_CHECKSUM.unpack_from(head, CHECKSUM_AT)[0], exact) if plain and exact is not None else None

    def drafts(self, blocks: Iterable[tuple[BlockKey, bool, int]], *, writer: int, created_unix_ms: int) -> bytes:
        """256 bytes for each block, its exactness and its owner: as `encode_header` makes them, with 0 for both
        checksums."""
        pack, ends, pieces = _IDENTITY.pack, dict[int, bytes](), list[bytes]()
        for key, exact, owner in blocks:
            if owner not in ends:
                stamps = _STAMPS.pack(0, writer, created_unix_ms, owner)
                ends[owner] = b"".join((self._sizes, stamps, self._after_owner, _NO_CHECKSUM))
            pieces += (self._starts[exact], pack(key.hash, key.parent, key.depth), ends[owner])
        return b"".join(pieces)


def identities_of(keys: Iterable[BlockKey]) -> bytes:
    """68 bytes for each: which block it is, as its header says."""
    pack = _IDENTITY.pack
    return b"".join([pack(key.hash, key.parent, key.depth) for key in keys])
