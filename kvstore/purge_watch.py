"""Tells a process when its copies of stored values must go, because the store was purged.

The purge's time lies under one key of each server and is read once a second. While a server does not answer nobody can
purge it either; when it is back, so is its key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from whalepod.core.clock import Clock, Deadline

from .transport import ValueTransport

EPOCH_KEY: Final = b"b:{purge}:epoch"
"""Inside the key patterns that a restricted user may read."""
POLL_S: Final = 1.0
PATIENCE_S: Final = 0.25


class PurgeWatch:
    """Calls `purged` with the epoch, in its own thread, after each purge of any server. `close` ends it."""

    def __init__(self, transport: ValueTransport, purged: Callable[[int], None], *, clock: Clock) -> None:
        self._transport = transport
        self._purged = purged
        self._clock = clock
        self._epoch = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kv-purges", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * PATIENCE_S)

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            for shard in self._transport.shards:
                heads = self._transport.heads(shard, [EPOCH_KEY], deadline=Deadline.after(PATIENCE_S, self._clock))
                head = heads[0] if heads else b""
                if head.isdigit() and int(head) > self._epoch:
                    self._epoch = int(head)
                    self._purged(self._epoch)
