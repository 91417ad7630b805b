"""The C half of reading values: `read_values.c`.

columns of a batch ──▶ whalepod_read_batch (no interpreter, no lock) ──▶ how many arrived as foreseen, a verdict each
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from .faults import StoreFault
from .native_library import Ahead, HeldBuffers, NativeLibrary, address_of


class Foreseen(NamedTuple):
    """Where values of one length go before anybody has judged them."""

    head_bytes: int
    """Of header and extension, received apart from the payload."""
    payload_bytes: int
    payloads: Sequence[memoryview]
    """Writable bytes, `payload_bytes` each."""
    plain: bytes
    """What every header should be but for its identity and for what differs between writers
    (`PlainBlockHeaders.plain`); empty: it is for the sinks to say."""
    identities: bytes
    """Of each (`plain_block_headers.identities_of`)."""
    exact_only: bool


class Verdict(IntEnum):
    """Of a value that was read."""

    NONE = 0
    """It is for the sink to say."""
    APPROXIMATE = 1
    """All agrees; not exact."""
    EXACT = 2


class Requests(NamedTuple):
    """Questions of one length about each of so many values; more may follow the last."""

    values: int
    bytes: bytes
    bytes_each: int

    def end(self, count: int) -> int:
        """Where the first `count` of them end."""
        return len(self.bytes) if count == self.values else count * self.bytes_each


class Arrived(NamedTuple):
    """What came of a call."""

    start: int
    end: int
    """Of what is read ahead now."""
    fault: StoreFault | None
    """What put the connection in doubt."""


class _Reading(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int64),
        ("done", ctypes.c_int64),
        ("sent", ctypes.c_int64),
        ("ahead", ctypes.c_int64),
        ("early", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("requests", ctypes.c_char_p),
        ("request_bytes", ctypes.c_int64),
        ("requests_bytes", ctypes.c_int64),
        ("heads", ctypes.c_void_p),
        ("head_bytes", ctypes.c_int64),
        ("payloads", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_int64),
        ("plain", ctypes.c_char_p),
        ("identities", ctypes.c_char_p),
        ("exact_only", ctypes.c_int64),
        ("payload_hashes", ctypes.c_void_p),
        ("verdicts", ctypes.c_void_p),
    )


class Reading:
    """A batch on its way over one connection. Its buffers stay where they are until it is closed."""

    def __init__(
        self,
        native: NativeLibrary,
        foreseen: Foreseen,
        requests: Requests,
        *,
        ahead: int,
        early: bool,
        spin_ns: int = 0,
    ) -> None:
        """`ahead`: how many may be asked for before the first is answered, `early`: besides one whose reply has begun.
        `spin_ns`: how long to look for something to receive before sleeping.
        Raises BufferError on a payload that is not one run of bytes which can be written."""
        count, head_bytes = requests.values, foreseen.head_bytes
        self._native = native
        self._held: HeldBuffers = native.hold(foreseen.payloads, writable=True)
        self._heads = array("B", bytes(count * head_bytes))
        self._head_bytes = head_bytes
        self._verdicts = array("B", bytes(count))
        self.payload_hashes = array("Q", bytes(8 * count))
        """xxh3-64 of the payloads that have arrived."""
        self._columns = _Reading(
            count, 0, 0, ahead, early, spin_ns, requests.bytes, requests.bytes_each, len(requests.bytes),
            address_of(self._heads), head_bytes, address_of(self._held.places), foreseen.payload_bytes,
            foreseen.plain or None, foreseen.identities, foreseen.exact_only,
            address_of(self.payload_hashes), address_of(self._verdicts),
        )  # fmt: skip

    @property
    def done(self) -> int:
        """Values taken, here or elsewhere."""
        return self._columns.done

    @property
    def sent(self) -> int:
        """Requests sent, here or elsewhere."""
        return self._columns.sent

    def proceed(self, descriptor: int, ahead: tuple[bytearray, int, int], *, sent: int, timeout_s: float) -> Arrived:
        """Ask for what is left and take it, up to a reply that is another than foreseen. `ahead`: a buffer, and from
        where to where it holds what was received before."""
        buffer, start, end = ahead
        self._columns.sent = sent
        ours = ctypes.c_char.from_buffer(buffer)  # it stays where it is as long as this lives
        received = Ahead(ctypes.addressof(ours), len(buffer), start, end)
        fault = self._native.read(descriptor, ctypes.addressof(self._columns), received, timeout_s=timeout_s)
        return Arrived(received.start, received.end, fault)

    def note_other_reply(self) -> None:
        """The next value's reply was taken elsewhere."""
        self._columns.done += 1

    def verdicts(self, first: int) -> bytes:
        """Of the values from `first` on that were taken here."""
        return self._verdicts[first : self._columns.done].tobytes()

    def head(self, number: int) -> bytes:
        """Header and extension of a value that has arrived."""
        return self._heads[number * self._head_bytes : (number + 1) * self._head_bytes].tobytes()

    def close(self) -> None:
        """Idempotent."""
        self._held.close()
