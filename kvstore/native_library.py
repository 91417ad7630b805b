"""The C halves of moving values (`read_values.c`, `write_values.c`, `held_buffers.c`), if the installation could build
them. All works without them, slower."""

from __future__ import annotations

import ctypes
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xxhash import _xxhash  # pyright: ignore[reportAttributeAccessIssue]  its compiled half has no stub

from .faults import FaultReason, StoreFault
from .value_format import BytesLike

FAULTS = (None, FaultReason.TIMEOUT, FaultReason.RESET, FaultReason.PROTOCOL)
"""By what the C halves say of a connection."""
TIMEOUT_NS_MAX = 3600 * 10**9
_BUFFER_WORDS = 10
"""Of 8 bytes, in a `Py_buffer`."""


class Ahead(ctypes.Structure):
    """The connection's bytes read ahead: [start, end) of `bytes`."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
    )


class ReadAhead:
    """A connection for the C halves: its descriptor and what was received before it was asked for, [start, end) of
    `buffer`."""

    __slots__ = ("_held", "buffer", "descriptor", "end", "start")

    def __init__(self, descriptor: int, buffer: bytearray, start: int, end: int) -> None:
        self.descriptor = descriptor
        self.buffer = buffer
        self.start = start
        self.end = end

    def lent(self) -> Ahead:
        """Where it is; it stays there until `returned`."""
        self._held = ctypes.c_char.from_buffer(self.buffer)
        return Ahead(ctypes.addressof(self._held), len(self.buffer), self.start, self.end)

    def returned(self, ahead: Ahead) -> None:
        del self._held
        self.start, self.end = ahead.start, ahead.end


class NativeLibrary:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, AttributeError if it is another one, or of other sources: the name of
        a function goes with the layout of what is passed."""
        free, locked = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._read, self._write = free.whalepod_read_batch, free.whalepod_write_lanes
        self._read.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Ahead), ctypes.c_void_p, ctypes.c_int64
        )  # fmt: skip
        self._read.restype = ctypes.c_int
        self._write.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._write.restype = None
        self._hold, self._release = locked.whalepod_hold, locked.whalepod_release
        self._hold.argtypes = (
            ctypes.py_object, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        self._release.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self._hold.restype = self._release.restype = None
        self._hash_at = ctypes.cast(ctypes.CDLL(_xxhash.__file__).XXH3_64bits, ctypes.c_void_p)
        """xxh3-64 inside the xxhash package's own library."""

    def read(self, descriptor: int, reading: int, ahead: Ahead, *, timeout_s: float) -> StoreFault | None:
        """`reading`: address of a `struct reading`. What put the connection in doubt. Runs without the interpreter."""
        return fault_of(self._read(descriptor, reading, ahead, self._hash_at, _nanoseconds(timeout_s)))

    def write(self, writing: ctypes.Structure, lanes: ctypes.Array[Any], *, timeout_s: float) -> None:
        """A `struct writing` and its lanes, which say how far they came. Runs without the interpreter."""
        self._write(ctypes.byref(writing), lanes, self._hash_at, _nanoseconds(timeout_s))

    def hold(self, buffers: Sequence[BytesLike], *, writable: bool = False) -> HeldBuffers:
        """Raises BufferError on one that is not one run of bytes or, with `writable`, cannot be written."""
        held = HeldBuffers(self._release, len(buffers))
        try:
            self._hold(list(buffers), len(buffers), writable, held.at, address_of(held.places), held.taken)
        except BaseException:
            held.close()
            raise
        return held


class HeldBuffers:
    """Bytes that stay where they are until this is closed. `places`: an address each."""

    __slots__ = ("_buffers", "_release", "places", "taken")

    def __init__(self, release: Callable[[int, int], object], count: int) -> None:
        self._release = release
        self._buffers = array("Q", bytes(8 * _BUFFER_WORDS * count))
        self.places = array("Q", bytes(8 * count))
        self.taken = ctypes.c_int64()

    @property
    def at(self) -> int:
        return address_of(self._buffers)

    def close(self) -> None:
        """Idempotent."""
        taken, self.taken.value = self.taken.value, 0
        self._release(self.at, taken)


def fault_of(result: int) -> StoreFault | None:
    """Of a connection in the C halves: what put it in doubt."""
    reason = FAULTS[result]
    return StoreFault(reason, "receive or send") if reason else None


def address_of(column: array[int]) -> int:
    """Of its first item; it stays there while nobody changes the column's length."""
    return column.buffer_info()[0]


def _nanoseconds(timeout_s: float) -> int:
    return min(int(timeout_s * 1e9), TIMEOUT_NS_MAX)


def _loaded() -> NativeLibrary | None:
    path = Path(__file__).with_name(f"_native_values{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        return NativeLibrary(path)
    except (OSError, AttributeError):
        return None


NATIVE = _loaded()
"""None: it was not built here, or the xxhash package does not show its hash."""
