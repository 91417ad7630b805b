"""Uses of stored blocks that the store is still to be told of, so that it keeps what devices serve.

Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.core.block_keys import RUN_BLOCKS, BlockHash, BlockKey, block_key

TOUCHES_MAX = 64
"""Chains in use that the store is still to be told of; past this the oldest are not."""
TOUCH_TIMEOUT_S = 0.1
"""For telling of one run: what comes meanwhile waits so long at most. Long enough to say something about a server
(`redis_shard.FAIR_CHANCE_S`)."""


@dataclass(slots=True)
class _Chain:
    hashes: Sequence[BlockHash]
    root: BlockHash
    told: int = 0


class Touches:
    def __init__(self) -> None:
        self._chains: deque[_Chain] = deque(maxlen=TOUCHES_MAX)

    def __bool__(self) -> bool:
        return bool(self._chains)

    def add(self, hashes: Sequence[BlockHash], *, root: BlockHash) -> None:
        """The leading blocks of a chain are being used."""
        if hashes:
            self._chains.append(_Chain(hashes, root))

    def take_run(self) -> list[BlockKey]:
        """What is told next, a run of the oldest at most; empty if there is nothing."""
        if not self._chains:
            return []
        chain = self._chains[0]
        until = min(len(chain.hashes), chain.told + RUN_BLOCKS)
        keys = [block_key(chain.hashes, depth, root=chain.root) for depth in range(chain.told, until)]
        chain.told = until
        if until == len(chain.hashes):
            self._chains.popleft()
        return keys

    def forget(self) -> None:
        """The store does not answer."""
        self._chains.clear()
