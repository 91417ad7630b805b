"""Where values go as they are read: nothing counts before its header has been judged, and its payload after the last
byte.

Both sinks keep why a value was not used and the bytes it began with, so that a corrupt one can be removed and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockKey

from .native_reads import Foreseen
from .plain_block_headers import PlainBlockHeaders
from .store_keys import block_store_key, snapshot_identity
from .value_format import (
    EXTENSION_BYTES,
    Flag,
    Header,
    PartKind,
    Refusal,
    SnapshotValue,
    parse_header,
    payload_checksum,
)
from .value_mac import ValueMac


@dataclass(frozen=True, slots=True)
class Rejected:
    """A value that was read and not used. `head`: its first 256 bytes, or all of it."""

    key: bytes
    refusal: Refusal
    head: bytes
    value_bytes: int


@dataclass(slots=True)
class BlockSink:
    """Takes one block into a buffer of the layout's `payload_bytes`."""

    block: BlockKey
    buffer: memoryview
    headers: PlainBlockHeaders
    exact_only: bool
    mac: ValueMac | None = None
    """Set: a value without a MAC of this key is refused."""
    key: bytes = field(init=False)
    verified: bool = field(default=False, init=False)
    """The whole block is in the buffer and agrees with its header."""
    exact: bool = field(default=False, init=False)
    rejected: Rejected | None = field(default=None, init=False)
    _head: bytes = field(default=b"", init=False)
    _checksum: int | Header = field(default=0, init=False)
    """The payload's xxh3-64, or a header that says how to check it."""
    _extension: memoryview | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.key = block_store_key(self.block)

    def take(self, *, exact: bool) -> bool:
        if self.exact_only and not exact:
            return False
        self.verified, self.exact, self.rejected = True, exact, None
        return True

    def foresee(self) -> Foreseen | None:
        if not self.buffer:
            return None
        plain = self.headers.expected(self.block) if self.mac is None and not self.headers.signed else b""
        return Foreseen(self.headers.header_bytes, self.buffer, plain)

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        self._head = head
        plain = self.headers.read(head, self.block, value_bytes=value_bytes)
        if plain is None:
            header = parse_header(head)
            refusal = header if isinstance(header, Refusal) else self._refusal(header, value_bytes)
            if isinstance(header, Header):
                self._checksum, self.exact = header, header.exact
                self._extension = _extension_of(header)
        else:
            self._checksum, self.exact = plain
            self._extension = memoryview(bytearray(EXTENSION_BYTES)) if self.headers.signed else None
            refusal = Refusal.NOT_EXACT if self.exact_only and not self.exact else None
        if refusal is None and self.mac is not None and self._extension is None:
            refusal = Refusal.MAC
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, head, value_bytes)
            return None
        return (self.buffer,) if self._extension is None else (self._extension, self.buffer)

    def finish(self, *, payload_hash: int | None = None) -> None:
        follows = (self.buffer,) if self._extension is None else (self._extension, self.buffer)
        refusal: Refusal | None = None
        if isinstance(self._checksum, Header):
            refusal = self._checksum.payload_refusal(follows)
        elif payload_hash is None or self._extension is not None:
            refusal = Refusal.CHECKSUM if payload_checksum(follows) != self._checksum else None
        elif payload_hash != self._checksum:
            refusal = Refusal.CHECKSUM
        if refusal is None:
            refusal = _mac_refusal(self.mac, self._head, (self.buffer,), self._extension)
        self.verified = refusal is None
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, self._head, len(self._head) + sum(map(len, follows)))

    def _refusal(self, header: Header, value_bytes: int) -> Refusal | None:
        return header.block_refusal(
            self.block,
            namespace=self.headers.namespace,
            layout=self.headers.layout,
            value_bytes=value_bytes,
            exact_only=self.exact_only,
        )


@dataclass(slots=True)
class SnapshotSink:
    """Takes one snapshot; memory for its parts is allocated once its header has been accepted."""

    key: bytes
    namespace: bytes
    format_id: int
    value_bytes_max: int
    mac: ValueMac | None = None
    """Set: a value without a MAC of this key is refused."""
    value: SnapshotValue | None = field(default=None, init=False)
    rejected: Rejected | None = field(default=None, init=False)
    _header: Header | None = field(default=None, init=False)
    _head: bytes = field(default=b"", init=False)
    _parts: tuple[memoryview, ...] = field(default=(), init=False)
    _extension: memoryview | None = field(default=None, init=False)

    def foresee(self) -> Foreseen | None:
        return None

    def take(self, *, exact: bool) -> bool:  # noqa: ARG002  it foresees nothing
        return False

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        header = parse_header(head)
        refusal = header if isinstance(header, Refusal) else self._refusal(header, value_bytes)
        if refusal is None and self.mac is not None and not _is_signed(header):
            refusal = Refusal.MAC
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, head, value_bytes)
            return None
        assert isinstance(header, Header)
        self._header, self._head = header, head
        self._extension = _extension_of(header)
        self._parts = tuple(memoryview(bytearray(part.bytes)) for part in header.parts)
        return self._follows

    @property
    def _follows(self) -> tuple[memoryview, ...]:
        return self._parts if self._extension is None else (self._extension, *self._parts)

    def finish(self, *, payload_hash: int | None = None) -> None:  # noqa: ARG002  it is of one part only
        header = self._header
        assert header is not None
        refusal = header.payload_refusal(self._follows)
        if refusal is None:
            refusal = _mac_refusal(self.mac, self._head, self._parts, self._extension)
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, self._head, header.header_bytes + header.payload_bytes)
            return
        self.value = SnapshotValue(
            boundary_tokens=header.tokens,
            mode=header.mode,
            parts={PartKind(part.kind): data for part, data in zip(header.parts, self._parts, strict=True)},
            valid_from=header.valid_from,
            exact=header.exact,
            draft_fingerprint=header.draft_fingerprint,
        )

    def _refusal(self, header: Header, value_bytes: int) -> Refusal | None:
        return header.snapshot_refusal(
            snapshot_identity(self.key),
            namespace=self.namespace,
            format_id=self.format_id,
            value_bytes=value_bytes,
            value_bytes_max=self.value_bytes_max,
        )


def _is_signed(header: Header | Refusal) -> bool:
    return isinstance(header, Header) and bool(header.flags & Flag.MAC)


def _extension_of(header: Header) -> memoryview | None:
    return memoryview(bytearray(EXTENSION_BYTES)) if _is_signed(header) else None


def _mac_refusal(
    mac: ValueMac | None, head: bytes, payload: Sequence[memoryview], extension: memoryview | None
) -> Refusal | None:
    if mac is None or (extension is not None and mac.verifies(head, payload, extension)):
        return None
    return Refusal.MAC
