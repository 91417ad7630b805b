"""The one way in for state that was not computed here: prefix hit, hand-off, resume after a preemption or a crash.

    admitted ──▶ begin ──▶ complete ──▶ rows from `computed` on
                   └──▶ store ──▶ Loaded ──▶ complete

Whatever is missing is a smaller boundary, at worst 0, and never an error.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import takewhile

from whalepod.core.block_keys import block_key, block_keys
from whalepod.core.lifecycle import Phase
from whalepod.kvstore import metrics
from whalepod.kvstore.store_keys import crash_snapshot_key, handoff_snapshot_key, turn_snapshot_key
from whalepod.kvstore.value_format import SnapshotValue

from .block_pool import BlockPool
from .boundaries import Boundaries
from .fetch_worth import FetchWorth
from .interface import Fidelity, SnapshotKind
from .options import RankOptions
from .prefetching import FetchedBlocks, Prefetcher
from .publishing import CRASH_KEPT, crash_borders
from .restore import Available, RestorePlan, SnapshotAt, Source, plan_restore
from .sequence import Sequence
from .snapshot_format import mode_of
from .state_image import Snapshot, StateImage
from .state_store import Loaded, LoadJob, OwnSnapshot, Prefetched
from .transfers import Transfers


class Restorer:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        *,
        image: StateImage,
        pool: BlockPool,
        boundaries: Boundaries,
        transfers: Transfers | None,
        options: RankOptions,
    ) -> None:
        self._image = image
        self._pool = pool
        self._boundaries = boundaries
        self._transfers = transfers
        self._options = options
        self.worth = FetchWorth()
        self._prefetcher: Prefetcher | None = None
        if transfers is not None:
            self._prefetcher = Prefetcher(
                pool=pool,
                boundaries=boundaries,
                transfers=transfers,
                block_bytes=image.block_layout.payload_bytes,
                options=options,
            )

    def reusable(self, sequence: Sequence) -> Ordered[int]:
        """Blocks on the device that hold the beginning of what the sequence needs. Changes nothing."""
        parked = sequence.parked
        if parked is not None and not all(parked.blocks_exact):
            return ()  # another request's approximate block is not the same as its own
        exact_only = parked is not None or sequence.fidelity is Fidelity.EXACT
        return self._pool.find(sequence.hashes[: self._blocks_wanted(sequence)], exact_only=exact_only)

    def prefetch(self, sequence: Sequence) -> None:
        """The sequence awaits its hand-off: fetch what is stored of its prefix already."""
        if self._prefetcher is not None and self._options.prefix_reuse:
            self._prefetcher.begin(sequence)

    def prefetched(self, sequence: Sequence | None, fetched: Prefetched) -> None:
        """The store has answered; None: for a sequence that has ended."""
        if self._prefetcher is not None and sequence is not None:
            self._prefetcher.complete(sequence, fetched)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends."""
        if self._prefetcher is not None:
            self._prefetcher.end(sequence)

    def begin(self, sequence: Sequence, shared: Ordered[int]) -> RestorePlan | None:
        """The sequence has its slot and blocks, `shared` first. None: it is loading, and `complete` will say more."""
        sequence.blocks_exact = [self._pool.is_exact(block_id) for block_id in shared]
        if sequence.parked is not None:
            payloads = sequence.parked.payloads[len(shared) :]
            flags = sequence.parked.blocks_exact[len(shared) :]
            return self._restore(sequence, payloads, flags, own=sequence.parked.snapshot, turn=None)
        job = self._job(sequence)
        if job is None or self._transfers is None:
            return self._restore(sequence, (), (), own=None, turn=None)
        sequence.advance(Phase.LOADING)
        self._transfers.load(job)
        return None

    def complete(self, sequence: Sequence, loaded: Loaded) -> RestorePlan:
        """The store has answered."""
        plan = self._restore(
            sequence, loaded.payloads, loaded.exact, own=loaded.own_snapshot, turn=loaded.turn_snapshot
        )
        if sequence.is_prefill and loaded.present_stored < loaded.job.blocks_present:
            sequence.blocks_published = loaded.present_stored
        return plan

    def _blocks_wanted(self, sequence: Sequence) -> int:
        """Leading full blocks that would be used if all were found."""
        if sequence.parked is not None:
            return sequence.parked.snapshot.boundary_tokens // self._boundaries.block_tokens
        if sequence.handoff is not None and sequence.handoff_unread:
            return sequence.handoff.boundary_tokens // self._boundaries.block_tokens
        if not (self._options.prefix_reuse and sequence.truncates):
            return 0
        length = sequence.prompt_tokens
        return self._boundaries.hit(stored_tokens=length, prompt_tokens=length) // self._boundaries.block_tokens

    def _job(self, sequence: Sequence) -> LoadJob | None:
        """What to ask the store for; None if nothing it has could help."""
        request, wanted = sequence.request, self._blocks_wanted(sequence)
        handed = sequence.handoff_unread
        if request.chain_root is None or not (wanted or handed):
            return None
        strict = sequence.fidelity is Fidelity.EXACT
        present = len(sequence.blocks_exact)
        if present == wanted and not handed and not strict and not sequence.is_prefill:
            return None
        own = self._own_snapshots(sequence)
        reached = max((wanted, *(one.blocks for one in own)))
        keys = block_keys(sequence.hashes[:reached], root=request.chain_root)

        def turn_key(blocks: int) -> bytes | None:
            tokens = blocks * self._boundaries.block_tokens
            boundary = self._boundaries.hit(stored_tokens=tokens, prompt_tokens=sequence.prompt_tokens)
            depth = boundary // self._boundaries.block_tokens - 1
            return turn_snapshot_key(keys[depth], mode=mode_of(SnapshotKind.ENCODER)) if depth >= 0 else None

        fetched = self._prefetched(sequence, present, wanted)
        timeout_s = self._options.load_timeout_s
        if not handed:
            rows = (reached - present) * self._boundaries.block_tokens
            timeout_s = self.worth.soft_deadline_s(rows, at_most_s=timeout_s)
        return LoadJob(
            owner=sequence.owner,
            keys=keys,
            blocks_present=present,
            blocks_wanted=wanted,
            payloads=fetched.payloads,
            payloads_exact=fetched.exact,
            confirm_present=sequence.is_prefill,
            exact_only=strict,
            deadline=request.deadline.earlier(timeout_s),
            block_worth_s=None if handed else self.worth.block_s(self._boundaries.block_tokens),
            own_snapshots=own,
            handed_off_by=sequence.handoff.direct_address if handed and sequence.handoff is not None else None,
            traceparent=request.traceparent,
            turn_snapshot=turn_key if strict else None,
        )

    def _own_snapshots(self, sequence: Sequence) -> list[OwnSnapshot]:
        """What this request may have left: when its last rank died, then at its prefill. The furthest comes first."""
        request, handoff = sequence.request, sequence.handoff
        root, size = request.chain_root, self._boundaries.block_tokens
        assert root is not None
        handed = handoff.boundary_tokens if handoff is not None else 0
        found = [
            OwnSnapshot(
                crash_snapshot_key(request.request_id, block_key(sequence.hashes, border // size - 1, root=root)),
                border // size,
            )
            for border in self._crash_borders(sequence)
            if border > handed
        ]
        if handoff is not None and handed:
            key = handoff_snapshot_key(request.request_id, request.attempt)
            found.append(OwnSnapshot(key, handed // size, handoff.direct_address))
        return found

    def _crash_borders(self, sequence: Sequence) -> list[int]:
        """Where it can go on, if its state there is stored: the row of a token that is known comes next."""
        tokens = min(sequence.rows_end, len(sequence.tokens)) - 1
        borders = crash_borders(sequence, self._boundaries, tokens=tokens, every=self._options.crash_tokens)
        return borders[:CRASH_KEPT]

    def _prefetched(self, sequence: Sequence, present: int, wanted: int) -> FetchedBlocks:
        if self._prefetcher is None:
            return FetchedBlocks()
        fetched = self._prefetcher.take(sequence, first_block=present)
        count = max(0, wanted - present)
        return FetchedBlocks(fetched.payloads[:count], fetched.exact[:count])

    def _restore(
        self,
        sequence: Sequence,
        payloads: Ordered[memoryview],
        flags: Ordered[bool],
        *,
        own: SnapshotValue | None,
        turn: SnapshotValue | None,
    ) -> RestorePlan:
        blocks_shared = len(sequence.blocks_exact)
        self._import_blocks(sequence, payloads, flags)
        own_snapshot = self._own(sequence, own)
        turn_snapshot = self._parse(turn, SnapshotKind.ENCODER)
        available = Available(
            blocks=len(sequence.blocks_exact),
            blocks_exact=sum(takewhile(bool, sequence.blocks_exact)),
            own_snapshot=_at(own_snapshot),
            turn_snapshot=_at(turn_snapshot),
        )
        # A parked state is the request's own, exact or not; nothing better can be computed from what it has.
        fidelity = Fidelity.FAST if sequence.parked is not None else sequence.fidelity
        plan = plan_restore(
            available, prompt_tokens=sequence.prompt_tokens, fidelity=fidelity, boundaries=self._boundaries
        )
        assert plan.write_start >= blocks_shared * self._boundaries.block_tokens, "a shared block would be rewritten"
        if sequence.shares_prefix and sequence.cached_tokens is None:
            self._count(sequence, plan, blocks_shared=blocks_shared)
        root = sequence.request.chain_root
        if self._transfers is not None and root is not None and sequence.parked is None and sequence.blocks_exact:
            self._transfers.touch(sequence.hashes[: len(sequence.blocks_exact)], root=root)
        used = {Source.OWN_SNAPSHOT: own_snapshot, Source.TURN_SNAPSHOT: turn_snapshot}.get(plan.source)
        if used is not None:
            assert sequence.slot is not None
            self._image.import_snapshot(used, slot=sequence.slot.index, blocks=sequence.blocks)
        sequence.resume_from(plan)
        if sequence.parked is None or not sequence.is_prefill:
            sequence.blocks_published = max(sequence.blocks_published, len(sequence.blocks_exact))
        return plan

    def _count(self, sequence: Sequence, plan: RestorePlan, *, blocks_shared: int) -> None:
        """Once a prompt. The store counts what is read from it."""
        length = sequence.prompt_tokens
        metrics.TOKENS.labels("device").inc(blocks_shared * self._boundaries.block_tokens)
        metrics.TOKENS.labels("recomputed").inc(max(0, length - plan.boundary))
        metrics.TOKENS.labels("replayed").inc(plan.replayed_tokens)
        if plan.boundary and plan.boundary == self._boundaries.hit(stored_tokens=length, prompt_tokens=length):
            metrics.LOST_TOKENS.labels("rounding").observe(self._boundaries.lost_to_rounding(length))

    def _import_blocks(self, sequence: Sequence, payloads: Ordered[memoryview], flags: Ordered[bool]) -> None:
        present = len(sequence.blocks_exact)
        for depth, (payload, exact) in enumerate(zip(payloads, flags, strict=True), start=present):
            self._image.import_block(sequence.blocks[depth], payload)
            if sequence.shares_prefix and self._options.prefix_reuse:
                self._pool.commit(sequence.blocks[depth], sequence.hashes[depth], exact=exact)
            sequence.blocks_exact.append(exact)

    def _own(self, sequence: Sequence, value: SnapshotValue | None) -> Snapshot | None:
        """This request's own snapshot, if it is well-formed and is what was announced."""
        if sequence.parked is not None:
            return self._parse(value, None)
        snapshot, handoff = self._parse(value, None), sequence.handoff
        if snapshot is None:
            return None
        length, next_token = sequence.prompt_tokens, snapshot.state.next_token
        if handoff is None or (snapshot.kind, snapshot.boundary) != (handoff.kind, handoff.boundary_tokens):
            left = snapshot.kind is SnapshotKind.FULL and snapshot.boundary in self._crash_borders(sequence)
            return snapshot if left and snapshot.state.prompt_tokens == length else None
        if not self._boundaries.may_hand_over(snapshot.kind, snapshot.boundary, prompt_tokens=length):
            return None
        known = sequence.tokens[snapshot.boundary : snapshot.boundary + 1]
        agrees = snapshot.kind is SnapshotKind.ENCODER or (next_token is not None and [next_token.id] == known)
        return snapshot if agrees and snapshot.state.prompt_tokens == length else None

    def _parse(self, value: SnapshotValue | None, kind: SnapshotKind | None) -> Snapshot | None:
        snapshot = self._image.parse(value) if value is not None else None
        return snapshot if snapshot is not None and kind in (None, snapshot.kind) else None


def _at(snapshot: Snapshot | None) -> SnapshotAt | None:
    return SnapshotAt(snapshot.boundary, snapshot.exact) if snapshot is not None else None
