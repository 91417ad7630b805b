"""The C half of writing values: `write_values.c`.

values of a batch ──▶ whalepod_stamp_and_write (no interpreter, no lock) ──▶ how many were answered as expected
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from .faults import StoreFault
from .native_library import FAULTS, TIMEOUT_NS_MAX, Ahead, HeldBuffers, load, xxh3
from .value_format import BytesLike

_WORDS_A_VALUE = 7
_STORED = 1
FIRST_VALUES = 4
"""So many are sent before the others are prepared."""


class Draft(NamedTuple):
    """A value of a header and one piece."""

    head: bytes
    payload: BytesLike
    stamp: bool
    """The header's two checksums are still to be written."""


class Drafted(Protocol):
    """A value that has a draft."""

    def draft(self) -> Draft: ...


class _Progress(ctypes.Structure):
    _fields_ = (
        ("words", ctypes.c_char_p),
        ("first_bytes", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("stamped", ctypes.c_int64),
        ("sent", ctypes.c_int64),
        ("answered", ctypes.c_int64),
    )


class Acknowledged(NamedTuple):
    """What came of a call."""

    stored: Sequence[bool]
    """Of the values that were answered in it; False: one is there already."""
    start: int
    end: int
    """Of what is read ahead now."""
    fault: StoreFault | None
    """What put the connection in doubt."""


class Sending:
    """A batch on its way over one connection. Its payloads stay where they are until it is closed."""

    def __init__(
        self,
        native: NativeWrites,
        values: Sequence[Drafted],
        starts: Sequence[bytes],
        ends: Sequence[bytes],
        *,
        ahead: int,
    ) -> None:
        """`starts` and `ends`: of each command, around its value. `ahead`: how many may be on their way before the
        first is answered."""
        count = len(values)
        self._native = native
        self._values = values
        self._held: list[HeldBuffers] = []
        self._places = array("q", bytes(8 * _WORDS_A_VALUE * count))
        pieces = [piece for pair in zip(starts, ends, strict=True) for piece in pair]
        self._words_end = list(accumulate(map(len, pieces)))[2::2]
        self._words_end.append(sum(map(len, pieces)))
        self._prepared = 0
        self._progress = _Progress(b"".join(pieces), len(starts[0]), ahead, 0, 0, 0)

    @property
    def answered(self) -> int:
        return self._progress.answered

    def proceed(self, descriptor: int, read_ahead: tuple[bytearray, int, int], *, timeout_s: float) -> Acknowledged:
        """The first call sends the first values, and leaves the server busy with them while the rest is prepared. The
        next ones send that and take the answers. Each ends at an answer that is another than expected."""
        self._prepare(len(self._values) if self._prepared else FIRST_VALUES)
        buffer, start, end = read_ahead
        ours = ctypes.c_char.from_buffer(buffer)
        received = Ahead(ctypes.addressof(ours), len(buffer), start, end)
        before, count = self._progress.answered, len(self._values)
        fault = self._native.write(
            descriptor,
            self._places.buffer_info()[0],
            self._prepared,
            all_sent=self._prepared < count,
            progress=self._progress,
            received=received,
            timeout_s=timeout_s,
        )
        answers = self._places[6::_WORDS_A_VALUE][before : self._progress.answered]
        return Acknowledged([answer == _STORED for answer in answers], received.start, received.end, fault)

    @property
    def expects_another(self) -> bool:
        """After a call without a fault: the next answer is another one than expected."""
        progress, prepared = self._progress, self._prepared
        return progress.sent < prepared or progress.answered < prepared == len(self._values)

    def note_other_answer(self) -> None:
        """The next value's answer was taken elsewhere."""
        self._progress.answered += 1

    def close(self) -> None:
        """Idempotent."""
        for held in self._held:
            held.close()

    def _prepare(self, until: int) -> None:
        """Say where values lie, up to number `until`."""
        first, until = self._prepared, min(until, len(self._values))
        if first == until:
            return
        drafts = [value.draft() for value in self._values[first:until]]
        heads = bytearray().join([draft.head for draft in drafts])
        held = HeldBuffers([heads, *[draft.payload for draft in drafts]])
        self._held.append(held)
        head_bytes = [len(draft.head) for draft in drafts]
        head_at, *payloads_at = held.addresses
        columns = (
            list(accumulate(head_bytes[:-1], initial=head_at)),
            head_bytes,
            payloads_at,
            [len(draft.payload) for draft in drafts],
            self._words_end[first:until],
            [draft.stamp for draft in drafts],
        )
        places = self._places
        for which, column in enumerate(columns):
            places[first * _WORDS_A_VALUE + which : until * _WORDS_A_VALUE : _WORDS_A_VALUE] = array("q", column)
        self._prepared = until


class NativeWrites:
    """The loaded library."""

    def __init__(self, library: ctypes.CDLL, hash_at: int) -> None:
        """Raises AttributeError if it is another library, or one of other sources: the name of its function goes with
        the layout of what is passed. `hash_at`: address of xxh3-64."""
        self._write = library.whalepod_stamp_and_write
        self._write.argtypes = (
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(_Progress),
            ctypes.POINTER(Ahead), ctypes.c_void_p, ctypes.c_int64,
        )  # fmt: skip
        self._write.restype = ctypes.c_int
        self._hash_at = hash_at

    def write(
        self,
        descriptor: int,
        places_at: int,
        count: int,
        *,
        all_sent: bool,
        progress: _Progress,
        received: Ahead,
        timeout_s: float,
    ) -> StoreFault | None:
        timeout_ns = min(int(timeout_s * 1e9), TIMEOUT_NS_MAX)
        result = self._write(descriptor, places_at, count, all_sent, progress, received, self._hash_at, timeout_ns)
        reason = FAULTS[result]
        return StoreFault(reason, "send or receive") if reason else None


def _loaded() -> NativeWrites | None:
    library, hash_at = load(), xxh3()
    try:
        return NativeWrites(library, hash_at) if library is not None and hash_at is not None else None
    except AttributeError:
        return None


NATIVE_WRITES = _loaded()
"""None: it was not built here."""
