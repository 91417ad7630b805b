"""The C halves of moving values (`read_values.c`, `write_values.c`, `held_buffers.c`), if the installation could build
them. All works without them, slower."""

from __future__ import annotations

import ctypes
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from xxhash import _xxhash  # pyright: ignore[reportAttributeAccessIssue]  its compiled half has no stub

from .faults import FaultReason, StoreFault
from .value_format import BytesLike

FAULTS = (None, FaultReason.TIMEOUT, FaultReason.RESET, FaultReason.PROTOCOL)
"""By what `NativeLibrary.read` and `write` return."""
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


class NativeLibrary:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded, AttributeError if it is another one, or of other sources: the name of
        a function goes with the layout of what is passed."""
        free, locked = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._read, self._write = free.whalepod_read_columns, free.whalepod_write_columns
        for moves in (self._read, self._write):
            moves.argtypes = (
                ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Ahead), ctypes.c_void_p, ctypes.c_int64
            )  # fmt: skip
            moves.restype = ctypes.c_int
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
        reason = FAULTS[self._read(descriptor, reading, ahead, self._hash_at, _nanoseconds(timeout_s))]
        return StoreFault(reason, "receive") if reason else None

    def write(self, descriptor: int, writing: int, ahead: Ahead, *, timeout_s: float) -> StoreFault | None:
        """`writing`: address of a `struct writing`. What put the connection in doubt. Runs without the interpreter."""
        reason = FAULTS[self._write(descriptor, writing, ahead, self._hash_at, _nanoseconds(timeout_s))]
        return StoreFault(reason, "send or receive") if reason else None

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
