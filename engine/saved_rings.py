"""The rings of some slots as they were before a step, which may be aborted and run again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from whalepod.model.caches import Caches


class SavedRings:
    """The rings of some slots before a step that writes over rows it reads. Shorter steps read nothing that they write
    over, and blocks are only ever written the same again: those steps can simply be run again."""

    def __init__(self, caches: Caches, slots: Sequence[int]) -> None:
        self._slots = list(slots)
        rings = (*caches.windows.values(), *caches.groups.values())
        self._saved: list[tuple[Tensor, Tensor]] = [(ring, ring[self._slots].clone()) for ring in rings]

    def restore(self) -> None:
        for ring, rows in self._saved:
            ring[self._slots] = rows
