"""The one way out for state: blocks as they fill, turn and crash snapshots at block borders, hand-offs, parking.

What a prefill request leaves is stored before its hand-off is reported. Everything else may be dropped: it is only a
cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice

from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import Clock, Deadline
from whalepod.core.errors import ServingError, StaleAttemptError, UnavailableError
from whalepod.core.ids import RequestId
from whalepod.kvstore.client import BlockToPut
from whalepod.kvstore.settings import RETENTION_S_MAX
from whalepod.kvstore.store_keys import crash_snapshot_key, handoff_snapshot_key, turn_snapshot_key
from whalepod.kvstore.value_format import SnapshotValue

from .block_pool import BlockPool
from .boundaries import Boundaries
from .finish import Finish
from .host_copies import Copied
from .interface import Fidelity, Handoff, HandoffEvent, SampledToken, SnapshotKind, StepEvent
from .options import RankOptions
from .parking import Parked
from .sequence import Sequence
from .snapshot_format import bytes_of, mode_of
from .state_image import StateImage
from .state_store import HandoffWritten
from .transfers import BlockWrite, EntrustedWrite, SnapshotWrite, Transfers

TURN_LIFE_S = 600.0
"""A conversation that pauses for longer resumes by replay (`design.md` §4)."""
CRASH_LIFE_S = TURN_LIFE_S
"""Of a request whose rank has died it is read at once; one that takes longer for its next is slow anyway."""
CRASH_KEPT = 2
TAKEN_OVER_S = 90.0
"""Who takes a request over from another rank has read what it left by then: routers wait for a rank 60 s by default."""
HANDOFF_LIFE_S = RETENTION_S_MAX
"""The longest there is, because the store evicts what expires first. The reader unlinks it."""


class Publisher:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        *,
        image: StateImage,
        pool: BlockPool,
        boundaries: Boundaries,
        transfers: Transfers | None,
        options: RankOptions,
        handoff_kind: SnapshotKind,
        clock: Clock,
    ) -> None:
        self._image = image
        self._pool = pool
        self._boundaries = boundaries
        self._transfers = transfers
        self._options = options
        self._handoff_kind = handoff_kind
        self._clock = clock
        self._parked_bytes_free = options.parked_bytes

    @property
    def block_tokens(self) -> int:
        return self._boundaries.block_tokens

    def commit_rows(self, sequence: Sequence) -> None:
        """Rows were computed: make full blocks findable, store them, and take a turn snapshot at a border."""
        block_tokens = self._boundaries.block_tokens
        if sequence.computed % block_tokens and sequence.computed // block_tokens == len(sequence.blocks_exact):
            return
        for depth in range(len(sequence.blocks_exact), sequence.computed // block_tokens):
            sequence.blocks_exact.append(sequence.exact)
            if sequence.shares_prefix and self._options.prefix_reuse:
                block_hash = sequence.hash_of(depth, block_tokens=block_tokens)
                self._pool.commit(sequence.blocks[depth], block_hash, exact=sequence.exact)
        self.publish_blocks(sequence)
        if sequence.computed % block_tokens == 0:
            self._publish_turn(sequence)
            self._publish_crash(sequence)

    def publish_blocks(self, sequence: Sequence) -> None:
        """Offer full blocks that are not stored yet. Those of a prefill request wait for room, others are dropped."""
        transfers, size = self._transfers, self._image.block_layout.payload_bytes
        if transfers is None or not sequence.shares_prefix:
            return
        owner = sequence.owner if sequence.is_prefill else None
        deadline = self._deadline(sequence)
        while sequence.blocks_published < len(sequence.blocks_exact):
            depth = sequence.blocks_published
            if owner is not None and depth in sequence.entrusted:
                transfers.write(EntrustedWrite(owner, sequence.entrusted[depth], self._deadline(sequence)))
                sequence.blocks_published += 1
                continue
            block_hash = sequence.hash_of(depth, block_tokens=self._boundaries.block_tokens)
            if transfers.has_room(size, owner=owner, block=block_hash):
                copied = self._image.export_block(sequence.blocks[depth])
                transfers.write(BlockWrite(copied.made(partial(self._block, sequence, depth)), size, owner, deadline))
            elif owner is not None:
                return
            sequence.blocks_published += 1

    def try_leave(self, sequence: Sequence) -> Handoff | None:
        """Take a prefilled prompt's hand-off one step further. Its result, if nothing has to be written for it."""
        leaving, transfers = sequence.leaving, self._transfers
        assert leaving is not None
        if transfers is None or not sequence.shares_prefix:
            return self._handoff(sequence, stored=False, blocks_stored=0)
        self.publish_blocks(sequence)
        if leaving.snapshot_sent or sequence.blocks_published < len(sequence.blocks_exact):
            return None
        copied = self._snapshot(sequence, self._handoff_kind, leaving.first_token)
        transfers.write(
            SnapshotWrite(
                handoff_snapshot_key(sequence.request.request_id, sequence.request.attempt),
                copied,
                life_s=HANDOFF_LIFE_S,
                bytes=bytes_of(copied.value),
                owner=sequence.owner,
                deadline=sequence.request.deadline,
                traceparent=sequence.request.traceparent,
            )
        )
        leaving.snapshot_sent = True
        return None

    def left(self, sequence: Sequence, written: HandoffWritten) -> Handoff | None:
        """All that belongs to the hand-off was written, or could not be. None: other ranks were to write some of it,
        and it is to leave once more, without them."""
        if not written.stored and sequence.entrusted and sequence.leaving is not None:
            sequence.blocks_published = min(sequence.entrusted)
            sequence.entrusted.clear()
            sequence.leaving.snapshot_sent = False
            return None
        return self._handoff(sequence, stored=written.stored, blocks_stored=written.blocks_stored)

    def park(self, sequence: Sequence) -> None:
        """Copy a sequence's state to host memory before it gives up its blocks, if there is room.

        With or without it, what the sequence meets when it comes back must be exact. While it still replays there is
        nothing to keep: it starts over.
        """
        if sequence.computed == 0 or sequence.computed < sequence.restored_tokens:
            return
        self.park_for(sequence, self.copy_of(sequence))

    def copy_of(self, sequence: Sequence) -> Parked | None:
        """All state of the rows that a sequence has computed, in host memory; None: there is no room."""
        full_blocks = sequence.computed // self._boundaries.block_tokens
        if full_blocks * self._image.block_layout.payload_bytes > self._parked_bytes_free:
            return None
        above = sequence.computed > sequence.floor
        blocks = [self._image.export_block(block_id) for block_id in sequence.blocks[:full_blocks]]
        snapshot = self._snapshot(sequence, SnapshotKind.FULL if above else SnapshotKind.ENCODER, None)
        return Parked(
            snapshot=snapshot.wait(),
            payloads=[block.wait() for block in blocks],
            blocks_exact=tuple(sequence.blocks_exact[:full_blocks]),
        )

    def park_for(self, sequence: Sequence, copy: Parked | None) -> None:
        """A sequence resumes from this copy if it could be made and there is room for it, else from what is exact."""
        sequence.resumed = True
        if copy is not None and copy.bytes <= self._parked_bytes_free:
            self._parked_bytes_free -= copy.bytes
            sequence.parked = copy

    def unpark(self, sequence: Sequence) -> None:
        """The sequence has resumed, or it has ended."""
        if sequence.parked is not None:
            self._parked_bytes_free += sequence.parked.bytes
            sequence.parked = None

    def let_go(self, sequence: Sequence) -> None:
        """The sequence is about to give up its slot, and comes back later."""
        if self._transfers is not None:
            self._transfers.drop(sequence.owner)
        if sequence.is_prefill:
            sequence.blocks_published = 0
            sequence.entrusted.clear()

    def end(self, sequence: Sequence, *, delivered: bool) -> None:
        """The sequence is about to end. What it has queued is still written if its result was delivered; a hand-off
        that nobody will read is removed."""
        self.unpark(sequence)
        if self._transfers is None:
            return
        if sequence.slot is not None and delivered:
            self._transfers.let_go(sequence.owner)
        elif sequence.slot is not None:
            self._transfers.drop(sequence.owner)
        abandoned = sequence.leaving is not None and sequence.leaving.snapshot_sent and not delivered
        # Who still awaits one was given up, perhaps just when the prefill rank had left it.
        if abandoned or sequence.handoff_unread or sequence.awaiting:
            self.unlink_handoff(sequence.request.request_id, sequence.request.attempt)

    def handoff_read(self, sequence: Sequence) -> None:
        """The sequence has resumed: its hand-off, if it had one, is of no more use."""
        if sequence.handoff_unread:
            self.unlink_handoff(sequence.request.request_id, sequence.request.attempt)
        sequence.handoff = None

    def unlink_unheard(self, events: Iterable[StepEvent]) -> None:
        """Nobody is told these: the hand-offs that they name are of no use."""
        for event in events:
            if isinstance(event, HandoffEvent) and event.handoff.stored:
                self.unlink_handoff(event.request_id, event.attempt)

    def unlink_handoff(self, request_id: RequestId, attempt: int) -> None:
        """Of no more use to anybody. Not there, or no longer: does nothing."""
        if self._transfers is not None:
            self._transfers.unlink(handoff_snapshot_key(request_id, attempt))

    def forget_crash(self, sequence: Sequence, *, after: ServingError | None = None, goes_on: bool = False) -> None:
        """The request has ended, perhaps with an error: nobody goes on from what it has left. `goes_on`: another rank
        may, or nobody, because its router has died. Of one that computes a prompt for another, or awaits that, it is
        not known."""
        unknown = isinstance(after, UnavailableError | StaleAttemptError) or sequence.is_prefill or sequence.awaiting
        if self._transfers is None or unknown:
            return
        tokens = max(sequence.computed, len(sequence.tokens) - 1)
        for border in self._crash_borders(sequence, tokens)[:CRASH_KEPT]:
            key = self._crash_key(sequence, border)
            if goes_on:
                self._transfers.unlink_later(key, Deadline.after(TAKEN_OVER_S, self._clock))
            else:
                self._transfers.unlink(key)

    def _publish_crash(self, sequence: Sequence) -> None:
        """Every so often, all state of an exact request that draws: who takes over recomputes what follows. A rank may
        die while one is being written, so the one before it stays."""
        transfers, borders = self._transfers, self._crash_borders(sequence, sequence.computed)
        if transfers is None or sequence.is_prefill or not sequence.exact or sequence.computed not in borders[:1]:
            return
        copied = self._snapshot(sequence, SnapshotKind.FULL, None)
        size = bytes_of(copied.value)
        if transfers.has_room(size, owner=None):
            key = self._crash_key(sequence, sequence.computed)
            transfers.write(SnapshotWrite(key, copied, CRASH_LIFE_S, size, None, self._deadline(sequence)))
        for border in borders[CRASH_KEPT : CRASH_KEPT + 1]:
            transfers.unlink(self._crash_key(sequence, border))

    def _crash_borders(self, sequence: Sequence, tokens: int) -> list[int]:
        return crash_borders(sequence, self._boundaries, tokens=tokens, every=self._options.crash_tokens)

    def _crash_key(self, sequence: Sequence, border: int) -> bytes:
        last = self._key(sequence, border // self._boundaries.block_tokens - 1)
        return crash_snapshot_key(sequence.request.request_id, last)

    def _publish_turn(self, sequence: Sequence) -> None:
        """Windows at a block border where a next turn may resume, unless something approximate is in them."""
        transfers, boundary = self._transfers, sequence.computed
        generated = boundary > sequence.prompt_tokens
        wanted = generated or boundary in self._boundaries.turn_borders(sequence.prompt_tokens)
        exact = sequence.exact and self._boundaries.window_start(boundary) >= sequence.windows_exact_from
        if transfers is None or not sequence.shares_prefix or not exact or not wanted:
            return
        copied = self._snapshot(sequence, SnapshotKind.ENCODER, None)
        size = bytes_of(copied.value)
        if transfers.has_room(size, owner=None):
            last = self._key(sequence, boundary // self._boundaries.block_tokens - 1)
            key = turn_snapshot_key(last, mode=mode_of(SnapshotKind.ENCODER))
            transfers.write(SnapshotWrite(key, copied, TURN_LIFE_S, size, None, self._deadline(sequence)))

    def _block(self, sequence: Sequence, depth: int, payload: memoryview) -> BlockToPut:
        exact, owner_tag = sequence.blocks_exact[depth], sequence.request.owner
        return BlockToPut(self._key(sequence, depth), payload, exact=exact, owner=owner_tag)

    def _snapshot(
        self, sequence: Sequence, kind: SnapshotKind, next_token: SampledToken | None
    ) -> Copied[SnapshotValue]:
        assert sequence.slot is not None
        return self._image.export_snapshot(
            kind,
            slot=sequence.slot.index,
            blocks=sequence.blocks,
            boundary=sequence.computed,
            prompt_tokens=sequence.prompt_tokens,
            exact=sequence.exact,
            next_token=next_token,
        )

    def _key(self, sequence: Sequence, depth: int) -> BlockKey:
        return sequence.key_of(depth, block_tokens=self._boundaries.block_tokens)

    def _deadline(self, sequence: Sequence) -> Deadline:
        """A prefill request waits for its blocks; the others' may be stored after the request has ended."""
        if sequence.is_prefill:
            return sequence.request.deadline
        return Deadline.after(self._options.publish_timeout_s, self._clock)

    def _handoff(self, sequence: Sequence, *, stored: bool, blocks_stored: int) -> Handoff:
        leaving = sequence.leaving
        assert leaving is not None
        return Handoff(
            boundary_tokens=sequence.computed if stored else 0,
            kind=self._handoff_kind if stored else None,
            first_token=leaving.first_token if stored else None,
            cached_tokens=sequence.cached_tokens or 0,
            replayed_tokens=sequence.replayed_tokens,
            blocks_stored=blocks_stored,
            exact=sequence.exact,
            stored=stored,
        )


def crash_borders(sequence: Sequence, boundaries: Boundaries, *, tokens: int, every: int) -> list[int]:
    """Where a request leaves crash snapshots up to `tokens`, newest first, some more than are kept; none, if it leaves
    none."""
    if sequence.request.fidelity is not Fidelity.EXACT or not (sequence.shares_prefix and sequence.truncates):
        return []
    borders = boundaries.crash_borders(prompt_tokens=sequence.prompt_tokens, tokens=tokens, every=every)
    return list(islice(borders, CRASH_KEPT + 1))


def finished_handoff(sequence: Sequence, token: SampledToken, finish: Finish) -> Handoff:
    """Of a request that its first token has ended: nothing is left for anybody to restore."""
    return Handoff(
        boundary_tokens=0,
        kind=None,
        first_token=token,
        finish_reason=finish.reason,
        matched_stop_id=finish.matched_stop_id,
        cached_tokens=sequence.cached_tokens or 0,
        replayed_tokens=sequence.replayed_tokens,
        exact=sequence.exact,
    )
