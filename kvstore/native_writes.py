"""The C half of writing values: `write_values.c`.

columns of a batch ──▶ whalepod_write_lanes (no interpreter, no lock) ──▶ what was answered as expected on each
connection
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import add
from typing import NamedTuple

from .faults import StoreFault
from .native_library import Ahead, HeldBuffers, NativeLibrary, ReadAhead, address_of, fault_of
from .value_format import BytesLike

LANES_MAX = 16
"""Connections of one batch at most, as in write_values.c."""
STORED, PRESENT = 1, 2
"""Answers to a SET that are expected; another is 0 here, and is for somebody else to read."""


class Drafts(NamedTuple):
    """Values of one length, each a header and one piece."""

    heads: bytes
    """Their headers, one after the other."""
    payloads: Sequence[BytesLike]
    payload_bytes: int
    stamp: bool
    """The headers' two checksums are still to be written."""


class Advance(NamedTuple):
    """What came of a call, on one lane."""

    numbers: range
    """The values that were answered in it."""
    answers: bytes
    """To each."""
    fault: StoreFault | None
    """What put the connection in doubt."""


class _Lane(ctypes.Structure):
    _fields_ = (
        ("fd", ctypes.c_int64),
        ("sent", ctypes.c_int64),
        ("answered", ctypes.c_int64),
        ("put", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("ahead", Ahead),
    )


class _Writing(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("lanes", ctypes.c_int64),
        ("stamped", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("words", ctypes.c_char_p),
        ("words_end", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("payloads", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_int64),
        ("stamp", ctypes.c_int64),
        ("answers", ctypes.c_void_p),
    )


class Writing:
    """A batch on its way over a few connections. Its payloads stay where they are until it is closed.

    Of n connections (lanes), number i has the values i, i + n, i + 2 n and so on.
    """

    def __init__(
        self,
        native: NativeLibrary,
        drafts: Drafts,
        starts: Sequence[bytes],
        ends: Sequence[bytes],
        *,
        lanes: int,
        ahead: int,
    ) -> None:
        """`starts` and `ends`: of each command, around its value. `ahead`: how many may be on their way over one
        connection before the first is answered. Raises BufferError on a payload that is not one run of bytes."""
        assert 0 < lanes <= min(LANES_MAX, len(starts)), "each connection has a value"
        count = len(starts)
        self._native = native
        self._held: HeldBuffers = native.hold(drafts.payloads)
        self._heads = array("B", drafts.heads)
        self._answers = array("B", bytes(count))
        words = [*starts[:lanes], *map(add, ends, [*starts[lanes:], *repeat(b"", lanes)])]
        self._words_end = array("q", accumulate(map(len, words)))
        self._columns = _Writing(
            count, lanes, 0, ahead, b"".join(words), address_of(self._words_end), address_of(self._heads),
            address_of(self._held.places), drafts.payload_bytes, drafts.stamp, address_of(self._answers),
        )  # fmt: skip
        self._lanes = (_Lane * lanes)(*[(0, 0, 0, -len(start)) for start in starts[:lanes]])

    def numbers(self, lane: int) -> range:
        """The values of a lane whose answers have not been taken, in order."""
        count, lanes = self._columns.count, self._columns.lanes
        return range(lane + self._lanes[lane].answered * lanes, count, lanes)

    def proceed(self, connections: Sequence[ReadAhead], *, timeout_s: float) -> list[Advance]:
        """Send what is left and take the answers, on each lane up to one that is another than expected."""
        before = [lane.answered for lane in self._lanes]
        for lane, connection in zip(self._lanes, connections, strict=True):
            lane.fd, lane.ahead = connection.descriptor, connection.lent()
        self._native.write(self._columns, self._lanes, timeout_s=timeout_s)
        answers, step = self._answers.tobytes(), len(before)
        advances = list[Advance]()
        for number, (lane, first, connection) in enumerate(zip(self._lanes, before, connections, strict=True)):
            connection.returned(lane.ahead)
            numbers = range(number + first * step, number + lane.answered * step, step)
            advances.append(Advance(numbers, answers[numbers.start : numbers.stop : step], fault_of(lane.result)))
        return advances

    def note_other_answer(self, lane: int) -> None:
        """The answer to the lane's next value was taken elsewhere."""
        self._lanes[lane].answered += 1

    def close(self) -> None:
        """Idempotent."""
        self._held.close()
