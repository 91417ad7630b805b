"""Reads a chain's blocks from wherever they are nearest (`design.md` §6).

    node cache ──▶ store ──▶ direct (the prefill rank's host memory) ──▶ what is still missing is computed
                     └── the other way round while the store is the slower of the two

What came from afar is left in the node cache. The same block is read once at a time, however many ask for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import Deadline

from . import metrics
from .block_batches import ASKED_BLOCKS, BlockBatches, leading
from .columns import rows
from .missing_keys import MissingKeys
from .node_cache import NodeCache
from .single_flight import SingleFlight
from .transport import Asked
from .value_sinks import WantedBlocks

PREFER_DIRECT = 2.0
"""A peer that is so many times faster than the store is asked first."""


class _Read(Protocol):
    """Fills some of the blocks wanted, those behind a gap perhaps not."""

    def __call__(self, blocks: WantedBlocks, wanted: Sequence[int], *, deadline: Deadline) -> None: ...


class BlockReader:
    """Thread-safe."""

    def __init__(self, store: BlockBatches | None, *, missing: MissingKeys, cache: NodeCache | None) -> None:
        """`store` None: there is none."""
        self._store = store
        self._missing = missing
        self._cache = cache
        self._flights = SingleFlight()

    def ask(
        self, keys: Sequence[BlockKey], *, peer: bool, block_worth_s: float | None, block_bytes: int
    ) -> Asked | None:
        """Ask the store for the first of some blocks that are about to be read, if that is where they will come from.
        None: nothing was asked."""
        store = self._store
        if store is None or peer or self._cache is not None or not _pays(store, block_bytes, block_worth_s):
            return None
        return None if self._flights.flies([key.hash for key in keys[:ASKED_BLOCKS]]) else store.ask(keys)

    def read(
        self,
        blocks: WantedBlocks,
        *,
        deadline: Deadline,
        peer: BlockBatches | None = None,
        told: bool = False,
        block_worth_s: float | None = None,
    ) -> None:
        """Fill the leading buffers. `told`: somebody has said that they are stored, so a miss of a moment ago is old
        news. A source known to take longer than `block_worth_s` for a block is not asked."""
        if self._cache is not None:
            self._cache.read(blocks)
            _count("l1", blocks, before=0)
        known = self._store is None or told
        sources: list[tuple[str, _Read, bool]] = []
        if self._store is not None and _is_worth(self._store, blocks, block_worth_s):
            sources.append(("store", self._from_store, known))
        if peer is not None and _is_worth(peer, blocks, block_worth_s):
            sources.insert(0 if self._prefers(peer) else 1, ("direct", peer.fetch, True))
        for name, read, certain in sources:
            before = blocks.verified
            wanted = self._up_to_gap(blocks, blocks.missing(), certain=certain)
            if not wanted or deadline.expired:
                continue
            read(blocks, wanted, deadline=deadline)
            _count(name, blocks, before=before)
            if self._cache is not None:
                self._cache.write(blocks, wanted)
        if blocks.verified < len(blocks.keys):
            self._count_lost(blocks, late=deadline.expired)

    def _count_lost(self, blocks: WantedBlocks, *, late: bool) -> None:
        """What is known to be missing is not lost to the deadline."""
        there = leading(blocks.verdicts)
        lost = (self._missing.before_first(blocks.names) if late else blocks.verified) - there
        if lost > 0:
            tokens = lost * blocks.headers.layout.block_tokens
            metrics.LOST_TOKENS.labels("deadline" if late else "hole").observe(tokens)

    def _prefers(self, peer: BlockBatches) -> bool:
        if self._store is None or not self._store.available:
            return True
        ours, theirs = self._store.read_bytes_per_s, peer.read_bytes_per_s
        return ours is not None and theirs is not None and theirs > PREFER_DIRECT * ours

    def _from_store(self, blocks: WantedBlocks, wanted: Sequence[int], *, deadline: Deadline) -> None:
        assert self._store is not None
        seats = self._flights.board(rows(blocks.hashes, wanted), lambda place: blocks.view(wanted[place]))
        own = [number for place, number in enumerate(wanted) if place not in seats] if seats else wanted
        try:
            if blocks.asked is not None and list(own[: ASKED_BLOCKS + 1]) != [*range(ASKED_BLOCKS + 1)]:
                blocks.asked.drop(deadline=deadline)  # nobody waits for others and holds a connection
            self._store.fetch(blocks, own, deadline=deadline)
        finally:
            self._flights.land(rows(blocks.hashes, own), lambda place: blocks.arrived(own[place]))
        again: list[int] = []
        for place, seat in seats.items():
            exact = self._flights.wait(seat, deadline=deadline)
            if exact is None:
                again.append(wanted[place])
            elif exact or not blocks.exact_only:
                blocks.take(wanted[place], exact=exact)
        if again and not deadline.expired:
            # Whoever read it was in more of a hurry, or asked for less.
            self._store.fetch(blocks, self._up_to_gap(blocks, again, certain=False), deadline=deadline)

    def _up_to_gap(self, blocks: WantedBlocks, numbers: Sequence[int], *, certain: bool) -> Sequence[int]:
        """Those before the first that is known to be missing: nothing behind it would be used. `certain`: none is."""
        if certain:
            return numbers
        return numbers[: self._missing.before_first(rows(blocks.names, numbers))]


def _pays(source: BlockBatches, block_bytes: int, block_worth_s: float | None) -> bool:
    speed = source.read_bytes_per_s
    return block_worth_s is None or speed is None or block_bytes / speed < block_worth_s


def _is_worth(source: BlockBatches, blocks: WantedBlocks, block_worth_s: float | None) -> bool:
    all_there = blocks.verified == len(blocks.keys)
    if all_there or _pays(source, blocks.headers.layout.payload_bytes, block_worth_s):
        return True
    metrics.FETCHES_NOT_WORTH.inc()
    return False


def _count(source: str, blocks: WantedBlocks, *, before: int) -> None:
    count = blocks.verified - before
    if count:
        metrics.TOKENS.labels(source).inc(count * blocks.headers.layout.block_tokens)
