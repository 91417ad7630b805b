"""The C half of writing values: `write_values.c`.

columns of a batch ──▶ whalepod_write_columns (no interpreter, no lock) ──▶ how many were answered as expected
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from .faults import StoreFault
from .native_library import Ahead, HeldBuffers, NativeLibrary, address_of
from .value_format import BytesLike

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


class Acknowledged(NamedTuple):
    """What came of a call."""

    answers: bytes
    """To the values that were answered in it."""
    start: int
    end: int
    """Of what is read ahead now."""
    fault: StoreFault | None
    """What put the connection in doubt."""


class _Writing(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("stamped", ctypes.c_int64),
        ("sent", ctypes.c_int64),
        ("answered", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("words", ctypes.c_char_p),
        ("first_bytes", ctypes.c_int64),
        ("words_end", ctypes.c_void_p),
        ("heads", ctypes.c_void_p),
        ("payloads", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_int64),
        ("stamp", ctypes.c_int64),
        ("answers", ctypes.c_void_p),
    )


class Writing:
    """A batch on its way over one connection. Its payloads stay where they are until it is closed."""

    def __init__(
        self, native: NativeLibrary, drafts: Drafts, starts: Sequence[bytes], ends: Sequence[bytes], *, ahead: int
    ) -> None:
        """`starts` and `ends`: of each command, around its value. `ahead`: how many may be on their way before the
        first is answered. Raises BufferError on a payload that is not one run of bytes."""
        count = len(starts)
        self._native = native
        self._held: HeldBuffers = native.hold(drafts.payloads)
        self._heads = array("B", drafts.heads)
        self._answers = array("B", bytes(count))
        following = [end + start for end, start in zip(ends, [*starts[1:], b""], strict=True)]
        self._words_end = array("q", accumulate(map(len, following), initial=len(starts[0])))
        self._columns = _Writing(
            count, 0, 0, 0, ahead, starts[0] + b"".join(following), len(starts[0]), address_of(self._words_end) + 8,
            address_of(self._heads), address_of(self._held.places), drafts.payload_bytes, drafts.stamp,
            address_of(self._answers),
        )  # fmt: skip

    @property
    def answered(self) -> int:
        """Values whose answers were taken, here or elsewhere."""
        return self._columns.answered

    def proceed(self, descriptor: int, ahead: tuple[bytearray, int, int], *, timeout_s: float) -> Acknowledged:
        """Send what is left and take the answers, up to one that is another than expected. `ahead`: a buffer, and from
        where to where it holds what was received before."""
        buffer, start, end = ahead
        first = self._columns.answered
        ours = ctypes.c_char.from_buffer(buffer)  # it stays where it is as long as this lives
        received = Ahead(ctypes.addressof(ours), len(buffer), start, end)
        fault = self._native.write(descriptor, ctypes.addressof(self._columns), received, timeout_s=timeout_s)
        answers = self._answers[first : self._columns.answered].tobytes()
        return Acknowledged(answers, received.start, received.end, fault)

    def note_other_answer(self) -> None:
        """The next value's answer was taken elsewhere."""
        self._columns.answered += 1

    def close(self) -> None:
        """Idempotent."""
        self._held.close()
