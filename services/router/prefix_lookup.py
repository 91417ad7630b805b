"""How much of a prompt is stored, asked before placing it. A guess: only the rank that fetches knows."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from whalepod.core.block_keys import BlockHash, block_keys
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.kvstore.client import KvClient

from .router_metrics import LOOKUP_SECONDS

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 0.05
"""A store slower than this is no help in placing."""

WORKERS = 4


class PrefixLookup:
    """Asks the store off the event loop. The client is made when the ranks have told their namespace."""

    def __init__(self, connect: Callable[[bytes], KvClient] | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """`connect` makes a client for a 16-byte namespace. None: there is no store, and nothing is ever stored."""
        self._connect = connect
        self._clock = clock
        self._store: KvClient | None = None
        self._connecting = threading.Lock()
        self._was_healthy = True
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="lookup")

    @property
    def healthy(self) -> bool:
        """Whether the store answers, as far as this process knows."""
        return self._store is None or self._store.healthy

    async def stored_blocks(self, hashes: Sequence[BlockHash], *, root: BlockHash, namespace: bytes) -> int:
        """How many leading blocks are stored; 0 if the store does not say in time."""
        if self._connect is None or not hashes:
            return 0
        with LOOKUP_SECONDS.time():
            return await asyncio.get_running_loop().run_in_executor(
                self._workers, self._lookup, hashes, root, namespace
            )

    def close(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        if self._store is not None:
            self._store.close()

    def _lookup(self, hashes: Sequence[BlockHash], root: BlockHash, namespace: bytes) -> int:
        assert self._connect is not None
        with self._connecting:
            if self._store is None:
                self._store = self._connect(namespace)  # one table of ranks has one namespace
        keys = block_keys(hashes, root=root)
        stored = self._store.lookup(keys, deadline=Deadline.after(LOOKUP_TIMEOUT_S, self._clock))
        healthy = self._store.healthy
        if healthy != self._was_healthy:
            self._was_healthy = healthy
            if healthy:
                log.info("the store answers lookups again")
            else:
                log.warning("the store does not answer lookups: ranks are chosen by load alone")
        return stored
