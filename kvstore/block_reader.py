"""Reads a chain's blocks from wherever they are nearest (`design.md` §6).

    node cache ──▶ store ──▶ direct (the prefill rank's host memory) ──▶ what is still missing is computed
                     └── the other way round while the store is the slower of the two

What came from afar is left in the node cache. The same block is read once at a time, however many ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whalepod.core.clock import Deadline

from . import metrics
from .block_batches import BlockBatches
from .missing_keys import MissingKeys
from .node_cache import NodeCache
from .single_flight import SingleFlight
from .value_sinks import BlockSink

_Read = Callable[[Sequence[BlockSink], Deadline], None]

PREFER_DIRECT = 2.0
"""A peer that is so many times faster than the store is asked first."""


class BlockReader:
    """Thread-safe."""

    def __init__(self, store: BlockBatches | None, *, missing: MissingKeys, cache: NodeCache | None) -> None:
        """`store` None: there is none."""
        self._store = store
        self._missing = missing
        self._cache = cache
        self._flights = SingleFlight()

    def read(
        self,
        sinks: Sequence[BlockSink],
        *,
        deadline: Deadline,
        peer: BlockBatches | None = None,
        told: bool = False,
        block_worth_s: float | None = None,
    ) -> None:
        """Fill the leading sinks. `told`: somebody has said that they are stored, so a miss of a moment ago is old
        news. A source known to take longer than `block_worth_s` for a block is not asked."""
        if self._cache is not None:
            self._cache.read(sinks)
            _count("l1", sinks, before=0)
        known = self._store is None or told
        sources: list[tuple[str, _Read, bool]] = []
        if self._store is not None and _is_worth(self._store, sinks, block_worth_s):
            sources.append(("store", self._from_store, known))
        if peer is not None and _is_worth(peer, sinks, block_worth_s):
            sources.insert(0 if self._prefers(peer) else 1, ("direct", _from(peer), True))
        for name, read, certain in sources:
            before = sum(sink.verified for sink in sinks)
            wanted = _up_to_gap([sink for sink in sinks if not sink.verified], None if certain else self._missing)
            if not wanted or deadline.expired:
                continue
            read(wanted, deadline)
            _count(name, sinks, before=before)
            if self._cache is not None:
                self._cache.write([sink for sink in wanted if sink.verified])

    def _prefers(self, peer: BlockBatches) -> bool:
        if self._store is None or not self._store.available:
            return True
        ours, theirs = self._store.read_bytes_per_s, peer.read_bytes_per_s
        return ours is not None and theirs is not None and theirs > PREFER_DIRECT * ours

    def _from_store(self, sinks: Sequence[BlockSink], deadline: Deadline) -> None:
        assert self._store is not None
        boarded = self._flights.board((sink.block.hash, sink.buffer) for sink in sinks)
        seats = list(zip(sinks, boarded, strict=True))
        own = [sink for sink, seat in seats if seat is None]
        try:
            self._store.fetch(own, deadline=deadline)
        finally:
            self._flights.land((sink.block.hash, sink.buffer, sink.exact if sink.verified else None) for sink in own)
        again: list[BlockSink] = []
        for sink, seat in seats:
            if seat is None:
                continue
            exact = self._flights.wait(seat, deadline=deadline)
            if exact is None:
                again.append(sink)
            elif exact or not sink.exact_only:
                sink.take(exact=exact)
        if again and not deadline.expired:
            # Whoever read it was in more of a hurry, or asked for less.
            self._store.fetch(_up_to_gap(again, self._missing), deadline=deadline)


def _is_worth(source: BlockBatches, sinks: Sequence[BlockSink], block_worth_s: float | None) -> bool:
    speed = source.read_bytes_per_s
    missing = next((sink for sink in sinks if not sink.verified), None)
    if block_worth_s is None or speed is None or missing is None or len(missing.buffer) / speed < block_worth_s:
        return True
    metrics.FETCHES_NOT_WORTH.inc()
    return False


def _from(batches: BlockBatches) -> _Read:
    return lambda sinks, deadline: batches.fetch(sinks, deadline=deadline)


def _up_to_gap(sinks: Sequence[BlockSink], missing: MissingKeys | None) -> Sequence[BlockSink]:
    """Those before the first that is known to be missing: nothing behind it would be used."""
    return sinks if missing is None else sinks[: missing.before_first(sink.key for sink in sinks)]


def _count(source: str, sinks: Sequence[BlockSink], *, before: int) -> None:
    blocks = sum(sink.verified for sink in sinks) - before
    if blocks:
        metrics.TOKENS.labels(source).inc(blocks * sinks[0].headers.layout.block_tokens)
