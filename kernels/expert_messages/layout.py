"""Where things lie in a message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.quantise import PackedFormat

SLOT_BYTES = 4
ALIGNMENT = 16
ABSENT = -1
"""The slot of a pair that the receiver has nothing to do with."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Of messages with room for so many rows."""

    rows: int
    chosen: int
    """Experts of a row."""
    width: int
    """Channels of a row."""
    dtype: torch.dtype
    packed: PackedFormat | None
    """How rows travel; None: as they are, in `dtype`."""

    @property
    def pairs(self) -> int:
        return self.rows * self.chosen

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize if self.packed is None else self.packed.record_bytes(self.width)

    @property
    def body_start(self) -> int:
        """Bytes in front of the first row."""
        return _aligned(self.pairs * SLOT_BYTES)

    @property
    def message_bytes(self) -> int:
        return self.body_start + _aligned(self.rows * self.row_bytes)


@dataclass(frozen=True, slots=True)
class Inboxes:
    """Memory of all ranks that every rank writes to: a message from each rank, then outputs that come back."""

    addresses: Tensor
    """[ranks] int64 where each begins, as this device sees it."""
    own: Tensor
    """[bytes] uint8"""
    outputs_start: int
    """Bytes in front of the outputs."""

    def messages(self, layout: MessageLayout) -> Tensor:
        """[ranks, layout.message_bytes] uint8 that came here."""
        count = len(self.addresses)
        assert count * layout.message_bytes <= self.outputs_start, "more rows than there is room for"
        return self.own[: count * layout.message_bytes].view(count, layout.message_bytes)

    def outputs(self, layout: MessageLayout) -> Tensor:
        """[layout.pairs, width] float32 that came back."""
        end = self.outputs_start + layout.pairs * layout.width * 4
        assert end <= len(self.own), "more rows than there is room for"
        return self.own[self.outputs_start : end].view(torch.float32).view(layout.pairs, layout.width)

    @staticmethod
    def room(layout: MessageLayout, ranks: int) -> tuple[int, int]:
        """Bytes in front of the outputs, and in all, for messages of this layout."""
        outputs_start = ranks * layout.message_bytes
        return outputs_start, outputs_start + layout.pairs * layout.width * 4


def aligned_view(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, at an aligned address: what follows must not depend on where a message happened to lie."""
    aligned = raw.clone() if raw.data_ptr() % 64 or not raw.is_contiguous() else raw
    return aligned.view(dtype)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
