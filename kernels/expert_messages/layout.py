"""Where things lie in a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.quantise import PackedFormat

HEAD_BYTES = 16
SLOT_BYTES = 4
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Of messages with room for so many rows."""

    places: int
    width: int
    """Channels of a row."""
    dtype: torch.dtype
    packed: PackedFormat | None
    """How rows travel; None: as they are, in `dtype`."""

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize if self.packed is None else self.packed.record_bytes(self.width)

    @property
    def body_start(self) -> int:
        """Bytes in front of the first row."""
        return HEAD_BYTES + _aligned(self.places * SLOT_BYTES)

    @property
    def message_bytes(self) -> int:
        return self.body_start + _aligned(self.places * self.row_bytes)


def aligned_view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, at an aligned address: what follows must not depend on where a message happened to lie."""
    aligned = raw.clone() if raw.data_ptr() % 64 or not raw.is_contiguous() else raw
    return aligned.view(dtype)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
