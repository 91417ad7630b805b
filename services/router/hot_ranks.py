"""Which decode rank holds the state of a conversation: by its session's name, else by the blocks it has in common.

What is forgotten costs a fetch from the store, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from whalepod.core.block_keys import BlockHash
from whalepod.core.ids import RankId

REMEMBERED_MAX = 65_536
LOOK_BACK_BLOCKS = 64
"""A next turn repeats what the last one ended with: its deepest blocks are new, these before them may be known."""


class HotRanks:
    """For one event loop. A session is a name within a tenant."""

    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._ranks: OrderedDict[tuple[str, str] | BlockHash, RankId] = OrderedDict()
        self._remembered_max = remembered_max

    def note(self, rank: RankId, *, session: tuple[str, str] | None, hashes: Sequence[BlockHash]) -> None:
        """A rank has generated for this conversation: it holds its blocks."""
        for key in (session, hashes[-1] if hashes else None):
            if key is not None:
                self._ranks[key] = rank
                self._ranks.move_to_end(key)
        while len(self._ranks) > self._remembered_max:
            self._ranks.popitem(last=False)

    def find(self, *, session: tuple[str, str] | None, hashes: Sequence[BlockHash]) -> RankId | None:
        """The session's rank, else the one that last met the longest prefix of the prompt."""
        if session is not None and session in self._ranks:
            return self._ranks[session]
        for block in reversed(hashes[-LOOK_BACK_BLOCKS:]):
            if block in self._ranks:
                return self._ranks[block]
        return None
