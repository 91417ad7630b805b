"""How often each token occurred, ready to be taken off a row of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_ROOM = 16


class TokenCounts:
    """Adding costs the same however many there are."""

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int64] = ()) -> None:
        ids, counts = np.unique(np.asarray(token_ids, np.int64), return_counts=True)
        self._distinct = len(ids)
        self._ids = np.concatenate([ids, np.zeros(_ROOM, np.int64)])
        self._counts = np.concatenate([counts, np.zeros(_ROOM)]).astype(np.float32)
        self._places = {int(token_id): place for place, token_id in enumerate(ids)}

    @property
    def ids(self) -> NDArray[np.int64]:
        """[distinct], each once."""
        return self._ids[: self._distinct]

    @property
    def counts(self) -> NDArray[np.float32]:
        """[distinct], of `ids`."""
        return self._counts[: self._distinct]

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, self._distinct)
        if place == self._distinct:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
            self._distinct += 1
        self._counts[place] += 1

    def plus(self, token_ids: Iterable[int]) -> TokenCounts:
        """These and some more; this one stays as it is."""
        more = TokenCounts()
        more._distinct, more._places = self._distinct, dict(self._places)
        more._ids, more._counts = self._ids.copy(), self._counts.copy()
        for token_id in token_ids:
            more.add(token_id)
        return more
