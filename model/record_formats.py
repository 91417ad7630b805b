"""How cache rows are stored: the released packed records, or plain floats for conformity.

Packing is part of the forward pass: a row is attended to as its record holds it, also by the forward that writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Rows as they are, in `dtype`."""

    dtype: torch.dtype

    def record_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode(self, x: Tensor) -> Tensor:
        """x [..., width] -> [..., record_bytes] uint8."""
        return x.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """records [..., record_bytes] uint8 -> [..., width] in `dtype`."""
        assert records.shape[-1] == self.record_bytes(width), (records.shape, width)
        return records.contiguous().view(self.dtype).to(dtype)

    def round_trip(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(x.dtype)


RecordFormat = PackedFormat | PlainFormat


@dataclass(frozen=True, slots=True)
class CacheFormats:
    """The formats of a rank's caches. `name` is part of the layout that the store's namespace covers."""

    name: str
    window: RecordFormat
    """Window rows of layers and draft blocks."""
    global_kv: RecordFormat
    index_key: RecordFormat
    """Index keys; index queries take the same round trip."""


RELEASE_FORMATS = CacheFormats("release", window=FP8_BLOCK32, global_kv=FP4_BLOCK16, index_key=MXFP4_BLOCK32)
"""What the model was trained with: 890 bytes of global KV and index keys a token (`spec/model.md`, Appendix B)."""


def plain_formats(dtype: torch.dtype) -> CacheFormats:
    """Unquantised caches."""
    plain = PlainFormat(dtype)
    return CacheFormats(f"plain-{str(dtype).removeprefix('torch.')}", plain, plain, plain)
