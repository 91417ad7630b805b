"""Computes the steps of a group's head: long segments with the group, everything else alone.

Blocks that a divided segment fills are stored by the ranks that compute their last rows.

What the others hold of a sequence ends where its last divided segment ended. If the next one begins elsewhere (rows
were restored from the store, computed alone, or the group is a new one), the state before it goes to them first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from whalepod.engine.device import LaunchedRows
from whalepod.engine.expert_parallel.transport import GroupBrokenError, Transport
from whalepod.engine.interface import Fidelity
from whalepod.engine.runner import RowLogits, StepRunner
from whalepod.engine.saved_rings import SavedRings
from whalepod.kernels.numerics import whole_batches
from whalepod.model.caches import Caches
from whalepod.model.context_parallel import owner_of
from whalepod.model.draft import Anchor, Chooser, Drafts
from whalepod.model.forward_pass import ForwardPass
from whalepod.model.network import Network

from .loop import HEAD, ContextLoop
from .orders import EntrustedBlock, Order, send_order
from .rows import TransportRows

log = logging.getLogger(__name__)


class ContextRunner:
    """A StepRunner."""

    def __init__(
        self, inner: StepRunner, network: Network, caches: Caches, loop: ContextLoop, *, rows_min: int, stores: bool
    ) -> None:
        """Segments of fewer than `rows_min` rows are computed alone. `stores`: the rank has a store, and blocks go to
        it."""
        self._inner = inner
        self._network = network
        self._caches = caches
        self._loop = loop
        self._rows_min = rows_min
        self._stores = stores
        self._epoch = 0
        self._held: dict[int, tuple[int, int]] = {}
        """By slot: the generation of its holder, and the position up to which the others have its state."""

    def run(self, rows: Sequence[LaunchedRows]) -> list[RowLogits | None]:
        """As the inner one does, to the bit where rows do not depend on their batch (`exact`)."""
        divided: dict[int, RowLogits | None] = {}
        for index, row in enumerate(rows):
            if self._may_divide(row):
                run = self._try_together(row)
                if run is not None:
                    wants_logits = row.segment.logits_start is not None
                    divided[index] = self._network.logits(run).float().cpu().numpy() if wants_logits else None
        rest = [row for index, row in enumerate(rows) if index not in divided]
        results = iter(self._inner.run(rest) if rest else [])
        self._loop.note(alone=sum(len(row.segment.token_ids) for row in rest))
        return [divided[index] if index in divided else next(results) for index in range(len(rows))]

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        """Alone."""
        return self._inner.draft(anchors, choose, tokens)

    def _may_divide(self, row: LaunchedRows) -> bool:
        segment = row.segment
        return len(segment.token_ids) >= self._rows_min and not segment.images and row.sequence.prompt_scores is None

    def _try_together(self, row: LaunchedRows) -> ForwardPass | None:
        """None: there is no group for it, or it broke. Everything a repeat reads is then as it was."""
        segment = row.segment
        saved: SavedRings | None = None
        entrusted = dict(row.sequence.entrusted)
        try:
            with self._loop.segment(len(segment.token_ids)) as transport:
                if transport is None:
                    return None
                saved = SavedRings(self._caches, [segment.slot])
                run = self._compute(row, transport)
        except GroupBrokenError as error:
            log.warning("a prompt goes on without its group: %s", error)
            row.sequence.entrusted = entrusted
            if saved is not None:
                saved.restore()
            return None
        self._held[segment.slot] = row.slot.generation, segment.end
        return run

    def _compute(self, row: LaunchedRows, transport: Transport) -> ForwardPass:
        """Raises GroupBrokenError."""
        segment, batches = row.segment, row.sequence.request.fidelity is Fidelity.FAST
        copied = self._blocks_lacking(row)
        entrusted = self._entrust(row, transport.size)
        order = Order.of(segment, self._caches, whole_batches=batches, copied_blocks=copied, entrusted=entrusted)
        copied_bytes = send_order(transport, order, self._caches)
        with whole_batches(batches):
            run = self._network.compute_shared(segment, self._caches, TransportRows(transport))
        self._loop.note(divided=len(segment.token_ids), copied_bytes=copied_bytes)
        return run

    def _entrust(self, row: LaunchedRows, ranks: int) -> list[EntrustedBlock]:
        """Blocks that the segment fills, whose last row another rank computes: all ranks have them then."""
        segment, sequence, tokens = row.segment, row.sequence, self._caches.block_tokens
        if not (self._stores and sequence.is_prefill and sequence.shares_prefix):
            return []
        entrusted: list[EntrustedBlock] = []
        for depth in range(max(segment.start, segment.write_start) // tokens, segment.end // tokens):
            last = (depth + 1) * tokens - 1 - segment.start
            rank = owner_of(last, len(segment.token_ids), ranks)
            if last < 0 or rank == HEAD:
                continue
            number, sequence.entrusted[depth] = self._loop.entrust()
            entrusted.append(
                EntrustedBlock.of(
                    sequence.key_of(depth, block_tokens=tokens),
                    rank=rank,
                    number=number,
                    block=segment.block_table[depth],
                    exact=sequence.exact,
                    owner=sequence.request.owner,
                    life_s=sequence.request.deadline.remaining_s(),
                )
            )
        return entrusted

    def _blocks_lacking(self, row: LaunchedRows) -> Sequence[int] | None:
        """Those that hold rows which the segment reads and does not write, if the others do not have them and the
        rings of its slot; None: they have all of it."""
        segment = row.segment
        if self._epoch != self._loop.epoch:
            self._held.clear()
            self._epoch = self._loop.epoch
        before = max(segment.start, segment.write_start)
        if not before or self._held.get(segment.slot) == (row.slot.generation, segment.start):
            return None
        return segment.block_table[: -(-before // self._caches.block_tokens)]
