"""Rows of an image's span as bytes: in the store, and on the wire between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.kvstore.value_format import PartKind, SnapshotValue

SPAN_MODE = 0x8000
"""Stamp of a stored span: no snapshot has this bit."""


def pack_rows(rows: Tensor) -> bytes:
    """[tokens, D], on any device, as the host's memory holds it."""
    return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def unpack_rows(data: bytes | bytearray | memoryview, *, tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
    """The inverse; None if the bytes are not those of so many rows of numbers. One that is none would spoil every row
    behind it, and the blocks that hold them."""
    if len(data) != tokens * width * dtype.itemsize or not tokens:
        return None
    rows = torch.frombuffer(bytearray(data), dtype=dtype).view(tokens, width)
    return rows if bool(rows.isfinite().all()) else None


def span_value(rows: Tensor, *, owner: int) -> SnapshotValue:
    """What the store is given. The field that says whose draft rows a snapshot has says whose rows these are, as it
    does of a block."""
    parts = {PartKind.STATE: pack_rows(rows)}
    return SnapshotValue(boundary_tokens=len(rows), mode=SPAN_MODE, parts=parts, draft_fingerprint=owner)


def rows_of_value(value: SnapshotValue | None, *, tokens: int, width: int, dtype: torch.dtype) -> Tensor | None:
    """None if there is no value, or it is another's."""
    if value is None or value.mode != SPAN_MODE or set(value.parts) != {PartKind.STATE}:
        return None
    return unpack_rows(value.parts[PartKind.STATE], tokens=tokens, width=width, dtype=dtype)
