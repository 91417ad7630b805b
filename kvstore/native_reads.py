"""The C half of reading values: `read_values.c`.

places of a batch ──▶ whalepod_ask_and_judge (no interpreter, no lock) ──▶ how many arrived as foreseen
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from .faults import StoreFault
from .native_library import FAULTS, TIMEOUT_NS_MAX, Ahead, load, xxh3

_WORDS_A_VALUE = 8
_address = ctypes.addressof
_FirstByte = ctypes.c_char


class Foreseen(NamedTuple):
    """Where a value of a known length goes before anybody has judged it."""

    head_bytes: int
    """Of header and extension, received apart from the payload."""
    payload: memoryview
    """Writable bytes."""
    plain: bytes = b""
    """What its header should be but for what differs between writers (`PlainBlockHeaders.expected`); empty: it is for
    the sink to say."""


class Verdict(IntEnum):
    """Of a value, by the C half."""

    NONE = 0
    """It is for the sink to say."""
    APPROXIMATE = 1
    """All agrees; not exact."""
    EXACT = 2


class Arrived(NamedTuple):
    """What came of a call."""

    whole: int
    """Leading values that are in place."""
    heads: bytearray
    """Theirs, one after the other."""
    payload_hashes: Sequence[int | None]
    """Their payloads' xxh3-64, if it was taken."""
    verdicts: Sequence[int]
    sent: int
    start: int
    end: int
    """Of what is read ahead now."""
    fault: StoreFault | None
    """What put the connection in doubt."""


class _Requests(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_char_p),
        ("sent", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("early", ctypes.c_int64),
    )


class NativeReads:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError if it is another library, or one of other sources: the name of its function goes with
        the layout of what is passed."""
        self._read = library.whalepod_ask_and_judge
        self._read.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_Requests), ctypes.POINTER(Ahead),
            ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64),
        )  # fmt: skip
        self._read.restype = ctypes.c_int
        self._hash = xxh3()

    def read(
        self,
        descriptor: int,
        values: Sequence[Foreseen],
        requests: Sequence[bytes],
        read_ahead: tuple[bytearray, int, int],
        *,
        sent: int,
        ahead: int,
        early: bool,
        timeout_s: float,
    ) -> Arrived:
        """Read leading `values`; `sent` of their `requests` are on their way, `ahead` may be; `early`: besides one
        whose reply has begun. `read_ahead`: a buffer, and from where to where it holds what was received before."""
        head_bytes = [value.head_bytes for value in values]
        heads, plains = bytearray(sum(head_bytes)), b"".join([value.plain for value in values])
        buffer, start, end = read_ahead
        # Buffers stay where they are as long as these live.
        first, ours = _FirstByte.from_buffer(heads), _FirstByte.from_buffer(buffer)
        held = [_FirstByte.from_buffer(value.payload) for value in values]
        plain_at = ctypes.cast(ctypes.c_char_p(plains), ctypes.c_void_p).value or 0
        plains_at = accumulate([len(value.plain) for value in values[:-1]], initial=plain_at)
        columns = (
            accumulate(head_bytes[:-1], initial=_address(first)),
            head_bytes,
            map(_address, held),
            [len(value.payload) for value in values],
            [at if value.plain else 0 for at, value in zip(plains_at, values, strict=True)],
            accumulate(map(len, requests)),
        )
        places = array("Q", bytes(8 * _WORDS_A_VALUE * len(values)))
        for which, column in enumerate(columns):
            places[which::_WORDS_A_VALUE] = array("Q", column)
        asked, done = _Requests(b"".join(requests), sent, ahead, early), ctypes.c_int64()
        received = Ahead(_address(ours), len(buffer), start, end)
        timeout_ns = min(int(timeout_s * 1e9), TIMEOUT_NS_MAX)
        at = places.buffer_info()[0]
        reason = FAULTS[self._read(descriptor, at, len(values), asked, received, self._hash, timeout_ns, done)]
        fault = StoreFault(reason, "receive") if reason else None
        count, words = done.value, _WORDS_A_VALUE
        hashes = places[6 : words * count : words] if self._hash else [None] * count
        verdicts = places[7 : words * count : words]
        return Arrived(count, heads, hashes, verdicts, asked.sent, received.start, received.end, fault)


def _loaded() -> NativeReads | None:
    library = load()
    try:
        return NativeReads(library) if library is not None else None
    except AttributeError:
        return None


NATIVE_READS = _loaded()
"""None: it was not built here."""
