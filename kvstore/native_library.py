"""The C halves of moving values (`read_values.c`, `write_values.c`), if the installation could build them. All works
without them, slower."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from xxhash import _xxhash  # pyright: ignore[reportAttributeAccessIssue]  its compiled half has no stub

from .faults import FaultReason
from .value_format import BytesLike

FAULTS = (None, FaultReason.TIMEOUT, FaultReason.RESET, FaultReason.PROTOCOL)
"""By what a function of the library returns."""
TIMEOUT_NS_MAX = 3600 * 10**9


class Ahead(ctypes.Structure):
    """The connection's bytes read ahead: [start, end) of `bytes`."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("end", ctypes.c_int64),
    )


class _Buffer(ctypes.Structure):
    """`Py_buffer` of Python's stable interface."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("owner", ctypes.c_void_p),
        ("length", ctypes.c_ssize_t),
        ("item_bytes", ctypes.c_ssize_t),
        ("read_only", ctypes.c_int),
        ("dimensions", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_take = ctypes.pythonapi.PyObject_GetBuffer
_take.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_take.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.c_void_p,)
_release.restype = None
_SIMPLE = 0
"""One run of bytes, to be read."""


class HeldBuffers:
    """Keeps bytes that are only read where they are, until it is closed, and says where: `addresses`. Raises
    BufferError on a buffer that is not one run of bytes."""

    def __init__(self, buffers: Sequence[BytesLike]) -> None:
        size = ctypes.sizeof(_Buffer)
        self._buffers = (_Buffer * len(buffers))()
        first = ctypes.addressof(self._buffers)
        self._places = range(first, first + size * len(buffers), size)
        self._taken = 0
        try:
            for place, buffer in zip(self._places, buffers, strict=True):
                _take(buffer, place, _SIMPLE)
                self._taken += 1
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[int]:
        return memoryview(self._buffers).cast("B").cast("Q").tolist()[:: ctypes.sizeof(_Buffer) // 8]

    def close(self) -> None:
        """Idempotent."""
        for place in self._places[: self._taken]:
            _release(place)
        self._taken = 0


def load() -> ctypes.CDLL | None:
    """None: it was not built here."""
    path = Path(__file__).with_name(f"_native_values{sysconfig.get_config_var('EXT_SUFFIX')}")
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None


def xxh3() -> int | None:
    """Address of the hash function inside the xxhash package's own library; None: it does not show it."""
    try:
        return ctypes.cast(ctypes.CDLL(_xxhash.__file__).XXH3_64bits, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
