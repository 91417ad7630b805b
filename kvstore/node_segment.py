"""The memory that all ranks of a node share: a file, mapped, with a lock that dies with its holder.

    | head 4 KiB | slots × SLOT | table: u32 × a power of two | slots × payload, page-aligned |

The kernel drops a killed process's lock, and `dirty` in the head tells the next holder that the last one did not
finish: it then rebuilds what follows from the slots' own fields; a slot that was being written is still free. A stopped
process keeps the lock, so nobody waits for it longer than `LOCK_S`: that is a miss.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from whalepod.core.clock import Clock, Deadline

HEAD_BYTES: Final = 4096
LOCK_S: Final = 0.05
LOCK_POLL_S: Final = 0.0002
MAGIC: Final = 0x5748414C45504431
HEAD: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("namespace", "S32"),
        ("slots", "<u8"),
        ("payload_bytes", "<u8"),
        ("dirty", "<u8"),
        ("time", "<u8"),
        ("epoch", "<u8"),
        ("tombstones", "<u8"),
    ]
)
SLOT: Final = np.dtype(
    [
        ("state", "<u4"),
        ("exact", "<u4"),
        ("hash", "S64"),
        ("parent", "S64"),
        ("checksum", "<u8"),
        ("used", "<u8"),
        ("parent_slot", "<i8"),
        ("children", "<u8"),
    ]
)
"""Hashes are kept as hexadecimal text, because numpy's byte strings drop trailing zeros."""
FREE: Final = 0
VALID: Final = 1


class SegmentBusyError(Exception):
    """Somebody has held the lock for too long."""


class NodeSegment:
    """One process's view. Thread-safe through `locked`; arrays may be touched only inside it."""

    def __init__(self, path: Path, *, namespace: bytes, slots: int, payload_bytes: int, clock: Clock) -> None:
        """Opens the segment or makes it. One that exists keeps its own number of slots; one of another shape is made
        anew. Raises OSError if there is no room for it."""
        self._clock = clock
        self._threads = threading.Lock()
        self._pause = threading.Event()
        self.path = path
        self._file = _opened(path)
        try:
            found = self._found_slots(namespace, payload_bytes)
            if not found and os.fstat(self._file).st_size:
                # Not shortened but replaced: somebody may have it mapped.
                path.unlink()
                os.close(self._file)
                self._file = _opened(path)
                found = self._found_slots(namespace, payload_bytes)
            slots = found or self._make(namespace, slots, payload_bytes)
            self._map(slots, payload_bytes)
            fcntl.flock(self._file, fcntl.LOCK_UN)
        except BaseException:
            os.close(self._file)
            raise

    @contextlib.contextmanager
    def locked(self) -> Generator[bool]:
        """Nobody else is in it. Yields whether the last holder died inside. Raises SegmentBusyError."""
        deadline = Deadline.after(LOCK_S, self._clock)
        if not self._threads.acquire(timeout=LOCK_S):
            raise SegmentBusyError
        try:
            while True:
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired:
                        raise SegmentBusyError from None
                    self._pause.wait(LOCK_POLL_S)
            try:
                was_dirty = bool(self.head["dirty"][0])
                self.head["dirty"][0] = 1
                yield was_dirty
                self.head["dirty"][0] = 0
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def payload(self, slot: int) -> memoryview:
        start = self._data_at + slot * self._stride
        return self._view[start : start + self.payload_bytes]

    def close(self) -> None:
        """Idempotent. The file stays, for the others and for a restart."""
        with self._threads:
            if self._file < 0:
                return
            del self.head, self.slots, self.table
            self._view.release()
            with contextlib.suppress(BufferError):  # a reader is still copying; the mapping goes with the process
                self._memory.close()
            os.close(self._file)
            self._file = -1

    def _found_slots(self, namespace: bytes, payload_bytes: int) -> int:
        """Slots of a segment that fits; 0: there is none."""
        raw = os.pread(self._file, HEAD.itemsize, 0)
        if len(raw) < HEAD.itemsize:
            return 0
        head = np.frombuffer(raw, HEAD)[0]
        slots = int(head["slots"])
        fits = (
            int(head["magic"]) == MAGIC
            and bytes(head["namespace"]) == namespace.hex().encode()
            and int(head["payload_bytes"]) == payload_bytes
            and os.fstat(self._file).st_size == _layout(slots, payload_bytes)[2]
        )
        return slots if fits else 0

    def _make(self, namespace: bytes, slots: int, payload_bytes: int) -> int:
        size = _layout(slots, payload_bytes)[2]
        # Reserved now: memory that is promised and not there would kill a process at its first touch.
        os.posix_fallocate(self._file, 0, size)
        head = np.zeros(1, HEAD)
        head["magic"], head["namespace"] = MAGIC, namespace.hex().encode()
        head["slots"], head["payload_bytes"] = slots, payload_bytes
        os.pwrite(self._file, head.tobytes(), 0)
        return slots

    def _map(self, slots: int, payload_bytes: int) -> None:
        table_entries, self._data_at, size = _layout(slots, payload_bytes)
        self._memory = mmap.mmap(self._file, size)
        self._view = memoryview(self._memory)
        self.payload_bytes = payload_bytes
        self._stride = _pages(payload_bytes)
        self.head = np.frombuffer(self._memory, HEAD, 1)
        self.slots = np.frombuffer(self._memory, SLOT, slots, HEAD_BYTES)
        table = np.frombuffer(self._memory, "<u4", table_entries, HEAD_BYTES + slots * SLOT.itemsize)
        self.table = cast("NDArray[np.uint32]", table)


def _opened(path: Path) -> int:
    """A descriptor with the lock held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _layout(slots: int, payload_bytes: int) -> tuple[int, int, int]:
    """Entries of the table, where the payloads begin, bytes in total."""
    table_entries = 1 << max(4, (2 * slots - 1).bit_length())
    data_at = _pages(HEAD_BYTES + slots * SLOT.itemsize + 4 * table_entries)
    return table_entries, data_at, data_at + slots * _pages(payload_bytes)


def _pages(size: int) -> int:
    return -(-size // HEAD_BYTES) * HEAD_BYTES
