"""Where values go as they are read: a header is judged before a byte of payload is received, the payload after its
last.

Both sinks keep why a value was not used and the bytes it began with, so that a corrupt one can be removed and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockKey

from .store_keys import block_store_key, snapshot_identity
from .value_format import BlockLayout, Header, PartKind, Refusal, SnapshotValue, parse_header


@dataclass(frozen=True, slots=True)
class Rejected:
    """A value that was read and not used. `head`: its first 256 bytes, or all of it."""

    key: bytes
    refusal: Refusal
    head: bytes
    value_bytes: int


@dataclass(slots=True)
class BlockSink:
    """Takes one block into a buffer of `layout.payload_bytes`."""

    block: BlockKey
    buffer: memoryview
    namespace: bytes
    layout: BlockLayout
    exact_only: bool
    key: bytes = field(init=False)
    verified: Header | None = field(default=None, init=False)
    """The block's header, once the whole block is in the buffer and agrees with it."""
    rejected: Rejected | None = field(default=None, init=False)
    _header: Header | None = field(default=None, init=False)
    _head: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        self.key = block_store_key(self.block)

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        header = parse_header(head)
        refusal = header if isinstance(header, Refusal) else self._refusal(header, value_bytes)
        if refusal is not None:
            self.rejected = Rejected(self.key, refusal, head, value_bytes)
            return None
        assert isinstance(header, Header)
        self._header, self._head = header, head
        return (self.buffer,)

    def finish(self) -> None:
        assert self._header is not None
        if refusal := self._header.payload_refusal((self.buffer,)):
            self.rejected = Rejected(self.key, refusal, self._head, len(self._head) + len(self.buffer))
        else:
            self.verified = self._header

    def _refusal(self, header: Header, value_bytes: int) -> Refusal | None:
        return header.block_refusal(
            self.block,
            namespace=self.namespace,
            layout=self.layout,
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
