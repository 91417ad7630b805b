"""Builds values to write: header, payload pieces as they lie in memory, and how long the store should keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import Clock
from whalepod.core.ids import Incarnation

from .plain_block_headers import PlainBlockHeaders
from .settings import StoreSettings
from .store_keys import block_store_key, snapshot_identity
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
    place_parts,
)
from .value_mac import ValueMac


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
    _block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        headers = PlainBlockHeaders(self.namespace, self.layout, signed=self.mac is not None)
        object.__setattr__(self, "headers", headers)
        object.__setattr__(self, "_block_bytes", headers.header_bytes + self.layout.payload_bytes)

    def block(self, key: BlockKey, payload: tuple[BytesLike, ...], *, exact: bool, owner: int = 0) -> ValueToWrite:
        """`payload`: pieces of flat bytes, `layout.payload_bytes` in total, which are read when the value is sent."""
        head = self.headers.draft(
            key, exact=exact, owner=owner, writer=self.incarnation, created_unix_ms=self.clock.unix_ms()
        )
        return ValueToWrite.drafted(
            block_store_key(key),
            head,
            payload,
            life_ms=self.settings.block_life_ms(key.depth),
            value_bytes=self._block_bytes,
            mac=self.mac,
        )

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


def flat(data: BytesLike) -> memoryview:
    """One-dimensional bytes, so that `len` counts bytes."""
    view = data if isinstance(data, memoryview) else memoryview(data)
    return view if view.ndim == 1 and view.format == "B" and view.c_contiguous else view.cast("B")


def flat_pieces(payload: BytesLike | Sequence[BytesLike]) -> tuple[memoryview, ...]:
    if isinstance(payload, bytes | bytearray | memoryview):
        return (flat(cast("BytesLike", payload)),)
    return tuple(flat(piece) for piece in payload)
