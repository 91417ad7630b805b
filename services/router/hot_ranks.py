"""Which decode rank holds the state of a conversation: by its session's name, else by the blocks it has in common.

What is forgotten costs a fetch from the store, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from whalepod.core.block_keys import BlockHash
from whalepod.core.ids import RankId

REMEMBERED_MAX = 65_536
LOOK_BACK_BLOCKS = 64
"""A next turn repeats what the last one ended with: its deepest blocks are new, these before them may be known."""


class Places(Protocol):
    """Ranks by a session within its tenant, or by the last block of a prompt. Bounded."""

    def get(self, key: tuple[str, str] | BlockHash) -> RankId | None: ...

    def put(self, key: tuple[str, str] | BlockHash, rank: RankId) -> None: ...


class OwnPlaces:
    """Of a router that is one process."""

    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._ranks: OrderedDict[tuple[str, str] | BlockHash, RankId] = OrderedDict()
        self._remembered_max = remembered_max

    def get(self, key: tuple[str, str] | BlockHash) -> RankId | None:
        return self._ranks.get(key)

    def put(self, key: tuple[str, str] | BlockHash, rank: RankId) -> None:
        self._ranks[key] = rank
        self._ranks.move_to_end(key)
        if len(self._ranks) > self._remembered_max:
            self._ranks.popitem(last=False)


class HotRanks:
    """For one event loop."""

    def __init__(self, places: Places | None = None) -> None:
        self._places = places or OwnPlaces()

    def note(self, rank: RankId, *, session: tuple[str, str] | None, hashes: Sequence[BlockHash]) -> None:
        """A rank has generated for this conversation: it holds its blocks."""
        for key in (session, hashes[-1] if hashes else None):
            if key is not None:
                self._places.put(key, rank)

    def find(self, *, session: tuple[str, str] | None, hashes: Sequence[BlockHash]) -> RankId | None:
        """The session's rank, else the one that last met the longest prefix of the prompt."""
        if session is not None and (rank := self._places.get(session)) is not None:
            return rank
        for block in reversed(hashes[-LOOK_BACK_BLOCKS:]):
            if (rank := self._places.get(block)) is not None:
                return rank
        return None
