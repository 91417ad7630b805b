"""Where values go as they are read: a header is judged before a byte of payload is received, the payload after its
last.

Both sinks keep why a value was not used and the bytes it began with, so that a corrupt one can be removed and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockKey

from .plain_block_headers import PlainBlockHeaders
from .store_keys import block_store_key, snapshot_identity
from .value_format import Header, PartKind, Refusal, SnapshotValue, parse_header, payload_checksum


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
    key: bytes = field(init=False)
    verified: bool = field(default=False, init=False)
    """The whole block is in the buffer and agrees with its header."""
    exact: bool = field(default=False, init=False)
    rejected: Rejected | None = field(default=None, init=False)
    _head: bytes = field(default=b"", init=False)
    _checksum: int | Header = field(default=0, init=False)
    """The payload's xxh3-64, or a header that says how to check it."""

    def __post_init__(self) -> None:
        self.key = block_store_key(self.block)

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        self._head = head
        plain = self.headers.read(head, self.block, value_bytes=value_bytes)
        if plain is None:
            header = parse_header(head)
            refusal = header if isinstance(header, Refusal) else self._refusal(header, value_bytes)
            if isinstance(header, Header):
                self._checksum, self.exact = header, header.exact
        else:
            self._checksum, self.exact = plain
            refusal = Refusal.NOT_EXACT if self.exact_only and not self.exact else None
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, head, value_bytes)
            return None
        return (self.buffer,)

    def finish(self) -> None:
        payload = (self.buffer,)
        if isinstance(self._checksum, Header):
            self.verified = self._checksum.payload_refusal(payload) is None
        else:
            self.verified = payload_checksum(payload) == self._checksum
        if not self.verified:
            self.rejected = Rejected(self.key, Refusal.CHECKSUM, self._head, len(self._head) + len(self.buffer))

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
    value: SnapshotValue | None = field(default=None, init=False)
    rejected: Rejected | None = field(default=None, init=False)
    _header: Header | None = field(default=None, init=False)
    _head: bytes = field(default=b"", init=False)
    _parts: tuple[memoryview, ...] = field(default=(), init=False)

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        header = parse_header(head)
        refusal = header if isinstance(header, Refusal) else self._refusal(header, value_bytes)
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, head, value_bytes)
            return None
        assert isinstance(header, Header)
        self._header, self._head = header, head
        self._parts = tuple(memoryview(bytearray(part.bytes)) for part in header.parts)
        return self._parts

    def finish(self) -> None:
        header = self._header
        assert header is not None
        if refusal := header.payload_refusal(self._parts):
            self.rejected = Rejected(self.key, refusal, self._head, len(self._head) + header.payload_bytes)
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
