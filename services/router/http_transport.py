"""Writes of one turn of the event loop in one system call: what a write costs is the call, and waking who reads.

write, write, … ─▶ held until the loop's next turn, or until much is held ─▶ the connection's own transport
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from typing import Any

HELD_BYTES_MAX = 64 * 1024
"""More is passed on at once, so that the transport can say that its client does not read."""

UNREAD_SECONDS_MAX = 60.0
"""How long a client may leave the rest of an answer unread once the connection is to be closed."""

READ_BYTES_MIN = 16 * 1024
"""What a client must read in such a time, or all there is: slow ones are waited for, but hold no place for ever."""


class GatheringTransport(asyncio.Transport):
    """A transport over another one. `close` writes what is held, for as long as that may take; `abort` drops it."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = inner
        self._loop = loop
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._look: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(bytes(data))
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES_MAX:
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Behind what is held. For what nothing else is written with."""
        if self._held:
            self._held.append(data)
            self._flush()
        elif not self._inner.is_closing():
            self._inner.write(data)

    def close(self) -> None:
        self._flush()
        if self._inner.is_closing():
            return
        self._inner.close()
        if self._inner.get_write_buffer_size():
            self.abort_unread(UNREAD_SECONDS_MAX)

    def abort_unread(self, seconds: float) -> None:
        """Abort as soon as its client has not read READ_BYTES_MIN for so long, unless `stop_looking` comes first."""
        self.stop_looking()
        self._look = self._loop.call_later(seconds, self._abort_if_unread, self._unread_bytes(), seconds)

    def stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def abort(self) -> None:
        self._held.clear()
        self._inner.abort()

    def is_closing(self) -> bool:
        return self._inner.is_closing()

    def get_extra_info(self, name: str, default: object = None) -> Any:  # noqa: ANN401  asyncio's own
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        self._inner.resume_reading()

    def _flush(self) -> None:
        """Without anything held: does nothing."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held and not self._inner.is_closing():
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def _abort_if_unread(self, before_bytes: int, seconds: float) -> None:
        if self._unread_bytes() > before_bytes - READ_BYTES_MIN:
            self.abort()
        else:
            self.abort_unread(seconds)

    def _unread_bytes(self) -> int:
        """Here and in the system's buffer, of which much is read before the connection counts as writable again."""
        try:
            there = fcntl.ioctl(self._inner.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:  # closed meanwhile
            return 0
        return self._inner.get_write_buffer_size() + struct.unpack("i", there)[0]
