"""Blocks that are stored already are fetched while the rest of a prompt is being prefilled elsewhere.

    soft slot ──▶ begin ──▶ store ──▶ Prefetched ──▶ complete: held in host memory ──▶ take, when the hand-off is there

They wait in host memory, within a budget, because a request that awaits its hand-off holds no block of the device.
What is not there in time is fetched with the hand-off.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from whalepod.core.block_keys import block_keys

from .block_pool import BlockPool
from .boundaries import Boundaries
from .interface import Fidelity
from .options import RankOptions
from .sequence import Prefetch, Sequence
from .state_store import Prefetched, PrefetchJob
from .transfers import Transfers


@dataclass(frozen=True, slots=True)
class FetchedBlocks:
    """Blocks that follow each other."""

    payloads: Ordered[memoryview] = ()
    exact: Ordered[bool] = ()


class Prefetcher:
    """Belongs to the engine's thread."""

    def __init__(
        self, *, pool: BlockPool, boundaries: Boundaries, transfers: Transfers, block_bytes: int, options: RankOptions
    ) -> None:
        self._pool = pool
        self._boundaries = boundaries
        self._transfers = transfers
        self._block_bytes = block_bytes
        self._timeout_s = options.load_timeout_s
        self.blocks_free = options.prefetch_bytes // block_bytes
        """Room in host memory."""

    def begin(self, sequence: Sequence) -> None:
        """A sequence awaits its hand-off. Fetches what is said to be stored and is not on the device, if there is
        room."""
        request, strict = sequence.request, sequence.fidelity is Fidelity.EXACT
        stored = min(request.stored_tokens // self._boundaries.block_tokens, len(request.block_hashes))
        present = len(self._pool.find(sequence.hashes[:stored], exact_only=strict))
        blocks = min(stored - present, self.blocks_free)
        if request.chain_root is None or blocks <= 0:
            return
        self.blocks_free -= blocks
        sequence.prefetch = Prefetch(first_block=present, blocks_reserved=blocks)
        self._transfers.prefetch(
            PrefetchJob(
                request.request_id,
                request.attempt,
                keys=block_keys(sequence.hashes[: present + blocks], root=request.chain_root),
                blocks_present=present,
                exact_only=strict,
                deadline=request.deadline.earlier(self._timeout_s),
            )
        )

    def complete(self, sequence: Sequence, fetched: Prefetched) -> None:
        """The store has answered, perhaps after the sequence went on without it."""
        if sequence.prefetch is not None:
            sequence.prefetch.payloads, sequence.prefetch.exact = fetched.payloads, fetched.exact

    def take(self, sequence: Sequence, *, first_block: int) -> FetchedBlocks:
        """What was fetched from `first_block` on; it is no longer held here."""
        prefetch = sequence.prefetch
        if prefetch is None:
            return FetchedBlocks()
        self.end(sequence)
        skipped = first_block - prefetch.first_block
        if skipped < 0:  # the device has lost blocks since: there is a gap
            return FetchedBlocks()
        return FetchedBlocks(prefetch.payloads[skipped:], prefetch.exact[skipped:])

    def end(self, sequence: Sequence) -> None:
        """The sequence needs it no more. One that is still being fetched is not, if its turn has not come."""
        if sequence.prefetch is not None:
            self._transfers.drop_prefetch(sequence.request.request_id, sequence.request.attempt)
            self.blocks_free += sequence.prefetch.blocks_reserved
            sequence.prefetch = None
