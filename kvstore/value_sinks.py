"""Where values go as they are read: nothing counts before its header has been judged, and its payload after the last
byte.

    WantedBlocks (columns) ──▶ as foreseen: a verdict each, no object      ──▶ verdicts, rejected
                           └─▶ anything else: a BlockSink judges that one ──┘

Why a value was not used is kept with the bytes it began with, so that a corrupt one can be removed and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.block_keys import BlockKey

from .columns import put_rows, rows
from .native_reads import Foreseen, Verdict
from .plain_block_headers import PlainBlockHeaders, identities_of
from .store_keys import block_store_keys, snapshot_identity
from .transport import Asked
from .value_format import (
    EXTENSION_BYTES,
    Flag,
    Header,
    PartKind,
    Refusal,
    SnapshotValue,
    flat,
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


class WantedBlocks:
    """Blocks to be read, in columns, and what has come of each. For one call; threads may read different blocks."""

    __slots__ = ("asked", "buffers", "exact_only", "hashes", "headers", "keys", "mac", "names", "rejected", "verdicts")

    def __init__(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[memoryview],
        headers: PlainBlockHeaders,
        *,
        exact_only: bool = False,
        mac: ValueMac | None = None,
        asked: Asked | None = None,
    ) -> None:
        """`asked`: the first of them have been asked for.
        `mac` set: a value without a MAC of this key is refused. Raises ValueError on a buffer that is not one run of
        writable bytes of the layout's `payload_bytes`."""
        payload_bytes = headers.layout.payload_bytes
        wrong = [view for view in buffers if view.nbytes != payload_bytes or view.readonly or not view.c_contiguous]
        if wrong or len(keys) != len(buffers):
            raise ValueError(f"each block has a buffer, which is writable and has {payload_bytes} bytes in one run")
        self.keys = keys
        self.hashes = [key.hash for key in keys]
        self.names = block_store_keys(keys)
        self.buffers = buffers
        self.headers = headers
        self.exact_only = exact_only
        self.mac = mac
        self.asked = asked
        self.verdicts = bytearray(len(keys))
        """`Verdict.NONE`: it has not arrived; any other: the whole block is in its buffer and agrees with its
        header."""
        self.rejected: dict[int, Rejected] = {}

    @property
    def verified(self) -> int:
        """How many have arrived."""
        return len(self.verdicts) - self.verdicts.count(Verdict.NONE)

    def missing(self) -> Sequence[int]:
        """Numbers of those that have not."""
        if not self.verified:
            return range(len(self.keys))
        return [number for number, verdict in enumerate(self.verdicts) if not verdict]

    def take(self, number: int, *, exact: bool) -> None:
        """It is in its buffer, and somebody has checked it."""
        self.verdicts[number] = Verdict.EXACT if exact else Verdict.APPROXIMATE
        self.rejected.pop(number, None)

    def arrived(self, number: int) -> tuple[memoryview, bool] | None:
        """Where it is, and whether it is exact. None: it has not arrived."""
        verdict = self.verdicts[number]
        return (self.view(number), verdict == Verdict.EXACT) if verdict else None

    def view(self, number: int) -> memoryview:
        """One-dimensional bytes."""
        return flat(self.buffers[number])

    def batch(self, numbers: Sequence[int]) -> BlockSinks:
        return BlockSinks(self, numbers)


class BlockSinks:
    """Some of the blocks wanted, for a transport."""

    __slots__ = ("_blocks", "_numbers", "keys")

    def __init__(self, blocks: WantedBlocks, numbers: Sequence[int]) -> None:
        self._blocks = blocks
        self._numbers = numbers
        self.keys = rows(blocks.names, numbers)

    def __getitem__(self, item: int) -> BlockSink:
        return BlockSink(self._blocks, self._numbers[item])

    @property
    def asked(self) -> Asked | None:
        return self._blocks.asked if self._numbers[0] == 0 else None

    def foresee(self, items: Sequence[int]) -> Foreseen:
        blocks, headers = self._blocks, self._blocks.headers
        numbers = rows(self._numbers, items)
        judged = blocks.mac is None and not headers.signed
        return Foreseen(
            head_bytes=headers.header_bytes,
            payload_bytes=headers.layout.payload_bytes,
            payloads=rows(blocks.buffers, numbers),
            plain=headers.plain if judged else b"",
            identities=identities_of(rows(blocks.keys, numbers)),
            exact_only=blocks.exact_only,
        )

    def take(self, items: Sequence[int], verdicts: bytes) -> None:
        blocks, numbers = self._blocks, rows(self._numbers, items)
        put_rows(blocks.verdicts, numbers, verdicts)
        for number, verdict in zip(numbers, verdicts, strict=True) if blocks.rejected else ():
            if verdict:
                blocks.rejected.pop(number, None)


class BlockSink:
    """Takes one block into its buffer: `open`, and if that gives places, `finish`."""

    __slots__ = ("_block", "_blocks", "_buffer", "_checksum", "_exact", "_extension", "_head", "_number")

    def __init__(self, blocks: WantedBlocks, number: int) -> None:
        self._blocks = blocks
        self._number = number
        self._block = blocks.keys[number]
        self._buffer = blocks.view(number)
        self._head = b""
        self._exact = False
        self._checksum: int | Header = 0
        """The payload's xxh3-64, or a header that says how to check it."""
        self._extension: memoryview | None = None

    def open(self, head: bytes, value_bytes: int) -> Sequence[memoryview] | None:
        blocks = self._blocks
        self._head = head
        plain = blocks.headers.read(head, self._block, value_bytes=value_bytes)
        if plain is None:
            header = parse_header(head)
            refusal = header if isinstance(header, Refusal) else self._refusal(header, value_bytes)
            if isinstance(header, Header):
                self._checksum, self._exact = header, header.exact
                self._extension = _extension_of(header)
        else:
            self._checksum, self._exact = plain
            self._extension = memoryview(bytearray(EXTENSION_BYTES)) if blocks.headers.signed else None
            refusal = Refusal.NOT_EXACT if blocks.exact_only and not self._exact else None
        if refusal is None and blocks.mac is not None and self._extension is None:
            refusal = Refusal.MAC
        if refusal is not None:
            self._reject(refusal, value_bytes)
            return None
        return self._follows

    def finish(self, *, payload_hash: int | None = None) -> None:
        follows = self._follows
        refusal: Refusal | None = None
        if isinstance(self._checksum, Header):
            refusal = self._checksum.payload_refusal(follows)
        elif payload_hash is None or self._extension is not None:
            refusal = Refusal.CHECKSUM if payload_checksum(follows) != self._checksum else None
        elif payload_hash != self._checksum:
            refusal = Refusal.CHECKSUM
        if refusal is None:
            refusal = _mac_refusal(self._blocks.mac, self._head, (self._buffer,), self._extension)
        if refusal is None:
            self._blocks.take(self._number, exact=self._exact)
        else:
            self._reject(refusal, len(self._head) + sum(map(len, follows)))

    @property
    def _follows(self) -> tuple[memoryview, ...]:
        return (self._buffer,) if self._extension is None else (self._extension, self._buffer)

    def _reject(self, refusal: Refusal, value_bytes: int) -> None:
        name = self._blocks.names[self._number]
        self._blocks.rejected[self._number] = Rejected(name, refusal, self._head, value_bytes)

    def _refusal(self, header: Header, value_bytes: int) -> Refusal | None:
        return header.block_refusal(
            self._block,
            namespace=self._blocks.headers.namespace,
            layout=self._blocks.headers.layout,
            value_bytes=value_bytes,
            exact_only=self._blocks.exact_only,
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

    @property
    def keys(self) -> Sequence[bytes]:
        return (self.key,)

    @property
    def asked(self) -> None:
        """There is nothing to be prepared meanwhile."""

    def __getitem__(self, item: int) -> SnapshotSink:
        """It is a batch of one."""
        return self

    def foresee(self, items: Sequence[int]) -> Foreseen | None:  # noqa: ARG002  its length is not known
        return None

    def take(self, items: Sequence[int], verdicts: bytes) -> None:
        """Nothing is foreseen."""

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
