"""Golden sets of serving (`tests/golden/README.md`, "Serving vectors"): every way in which a request meets state that
it did not compute, through the engine's own boundaries, plans, blocks and snapshots.

Where the vectors say that a path equals the cold request it is compared with the cold arrays, where it approximates
with its own. The last row of the halo shows in float64 only, so that check brings its own prompt and compares two
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.conformity import Comparison, SetResult, Vectors, compare, on_cpu
from whalepod.model.conformity_draft import compare_round, draft_round
from whalepod.model.conformity_folder import Mode, VectorFolder, cache_formats
from whalepod.model.conformity_rows import compare_logits, token_list
from whalepod.model.draft import Anchor
from whalepod.model.forward_pass import Recorder
from whalepod.model.network import Network
from whalepod.model.tensor_layout import ModelRole

from .boundaries import Boundaries
from .interface import Fidelity, SnapshotKind
from .restore import Available, RestorePlan, SnapshotAt, plan_restore
from .state_image import StateImage

HALO_TOLERANCE = 1e-13
"""Float64 runs of the same rows agree to 1.2e-14 in the vectors' table; one replayed row fewer moves them by at least
1e-12."""
STEPS = 8
"""Decode steps that are compared after state has moved; a cold request is compared to its end."""
CHUNKS = (1, 7, 16, 27, 33)
CRASH_TOKENS = 10
"""Recovery in the vectors: a new prompt of the old one and so many of the tokens after it."""


def run_serving_sets(
    folder: VectorFolder, vectors: Vectors, mode: Mode, name: str, *, only: Collection[str] = ()
) -> Iterator[SetResult]:
    """One result for every path of every prompt of the file. `only`: names of `CHECKS`, all if empty."""
    for head in vectors.heads():
        prompt = _Prompt.of(vectors.below(f"{head}."), folder, mode)
        for label, check in CHECKS.items():
            if label in only or not only:
                yield compare(f"{name} {head} {label}", lambda c, check=check, prompt=prompt: check(c, prompt))


@dataclass(slots=True)
class _Rank:
    """One rank's caches, holding one sequence."""

    network: Network
    boundaries: Boundaries
    image: StateImage
    caches: Caches

    @classmethod
    def of(cls, network: Network, block_tokens: int, mode: Mode, *, tokens: int) -> _Rank:
        boundaries = Boundaries(network.config, block_tokens)
        caches = Caches.allocate(
            network.config,
            blocks=boundaries.blocks(tokens),
            slots=1,
            formats=cache_formats(mode, network.dtype),
            block_tokens=block_tokens,
            role=network.role,
            dtype=torch.promote_types(network.dtype, torch.float32),
            device=network.device,
        )
        return cls(network, boundaries, StateImage(caches, network.config), caches)

    @property
    def blocks(self) -> Sequence[int]:
        return range(next(iter(self.caches.global_kv.values())).shape[0])

    def compute(
        self,
        ids: Sequence[int],
        start: int,
        end: int,
        *,
        prompt_tokens: int,
        plan: RestorePlan | None = None,
        chunk: int | None = None,
        recorder: Recorder | None = None,
    ) -> Tensor:
        """Rows start … end - 1 of a request of `prompt_tokens`; logits of those at and above its floor."""
        logits: list[Tensor] = []
        look_back = max(self.network.config.engram_max_ngram_size - 1, 0)
        for first in range(start, end, chunk or max(1, end - start)):
            segment = Segment(
                slot=0,
                block_table=self.blocks,
                start=first,
                token_ids=ids[first : min(end, first + chunk) if chunk else end],
                history=ids[max(0, first - look_back) : first],
                floor=self.network.config.floor(prompt_tokens),
                window_start=plan.window_start if plan else 0,
                write_start=plan.write_start if plan else 0,
                logits_start=0,
            )
            logits.append(self.network.forward([segment], self.caches, recorder=on_cpu(recorder)).cpu())
        return torch.cat(logits)

    def receive(
        self,
        source: _Rank,
        *,
        boundary: int,
        prompt_tokens: int,
        kind: SnapshotKind | None = None,
        own: bool = True,
        fidelity: Fidelity = Fidelity.EXACT,
    ) -> RestorePlan:
        """Take over what `source` has below `boundary`: its full blocks, and a snapshot if a kind is given."""
        full_blocks = boundary // self.boundaries.block_tokens
        for block_id in range(full_blocks):
            self.image.import_block(block_id, source.image.export_block(block_id).wait())
        snapshot = None
        if kind is not None:
            value = source.image.export_snapshot(
                kind, slot=0, blocks=source.blocks, boundary=boundary, prompt_tokens=prompt_tokens
            )
            snapshot = self.image.parse(value.wait())
            assert snapshot is not None, "a snapshot of the same model is well-formed"
            self.image.import_snapshot(snapshot, slot=0, blocks=self.blocks)
        at = SnapshotAt(boundary, exact=True) if snapshot is not None else None
        return plan_restore(
            Available(
                blocks=full_blocks,
                blocks_exact=full_blocks,
                own_snapshot=at if own else None,
                turn_snapshot=None if own else at,
            ),
            prompt_tokens=prompt_tokens,
            fidelity=fidelity,
            boundaries=self.boundaries,
        )


@dataclass(slots=True)
class _Prompt:
    """One recorded request."""

    vectors: Vectors
    folder: VectorFolder
    mode: Mode
    network: Network
    tokens: int
    """L."""
    ids: list[int]
    """Prompt, then the forced tokens."""
    block_tokens: int
    _encoder: list[Network] = field(default_factory=list)

    @classmethod
    def of(cls, vectors: Vectors, folder: VectorFolder, mode: Mode) -> _Prompt:
        ids = token_list(vectors, "ids")
        return cls(
            vectors=vectors,
            folder=folder,
            mode=mode,
            network=folder.network(mode),
            tokens=len(ids),
            ids=ids + token_list(vectors, "next_ids"),
            block_tokens=token_list(vectors, "block_tokens")[0],
        )

    def rank(self, network: Network | None = None, *, tokens: int = 0) -> _Rank:
        length = max(tokens, len(self.ids))
        return _Rank.of(network or self.network, self.block_tokens, self.mode, tokens=length)

    def encoder(self) -> Network:
        """The weights of a rank without the layers above the last KV source."""
        if not self._encoder:
            directory = self.folder.checkpoint(self.mode)
            self._encoder.append(
                Network.load(directory, role=ModelRole.ENCODER, dtype=self.network.dtype, device=self.network.device)
            )
        return self._encoder[0]

    def cold(self) -> _Rank:
        """A rank that has computed the prompt."""
        rank = self.rank()
        rank.compute(self.ids, 0, self.tokens, prompt_tokens=self.tokens)
        return rank

    def continued(
        self, c: Comparison, label: str, rank: _Rank, plan: RestorePlan, *, steps: int = STEPS, arrays: str = ""
    ) -> None:
        """Compute what a plan leaves of the prompt, then decode; both against the arrays whose names start so."""
        pairs: list[tuple[str, Tensor, Tensor]] = []
        if plan.boundary < self.tokens:
            logits = rank.compute(self.ids, plan.start, self.tokens, prompt_tokens=self.tokens, plan=plan)
            pairs.append((f"{label} prompt", logits, self.vectors[f"{arrays}logits"]))
        decoded = rank.compute(
            self.ids, self.tokens, self.tokens + steps, prompt_tokens=self.tokens, plan=plan, chunk=1
        )
        pairs.append((f"{label} decode", decoded, self.vectors[f"{arrays}decode_logits"][:steps]))
        compare_logits(c, pairs, self.mode)

    def hits(self) -> list[int]:
        """Boundaries R at which the vectors hold a hit."""
        return sorted(int(head.removeprefix("hit")) for head in self.vectors.heads() if head.startswith("hit"))


def _check_cold(c: Comparison, prompt: _Prompt) -> None:
    """Kept rows of the prompt, what the drafter reads of them, then decode to the end; and K itself."""
    vectors, recorded, rank = prompt.vectors, dict[str, Tensor](), prompt.rank()
    c.equal("kept rows", torch.tensor([prompt.network.config.kept_rows]), vectors["kept_rows"])
    logits = rank.compute(prompt.ids, 0, prompt.tokens, prompt_tokens=prompt.tokens, recorder=recorded.__setitem__)
    pairs = [("prompt", logits, vectors["logits"])]
    if "target_hidden" in vectors and not prompt.mode.quantised_caches:
        c.floats("target hidden", recorded["target_hidden"], vectors["target_hidden"])
    steps = len(prompt.ids) - prompt.tokens
    decoded = rank.compute(prompt.ids, prompt.tokens, len(prompt.ids), prompt_tokens=prompt.tokens, chunk=1)
    compare_logits(c, [*pairs, ("decode", decoded, vectors["decode_logits"][:steps])], prompt.mode)


def _check_drafts(c: Comparison, prompt: _Prompt) -> None:
    """`draft.pos{p}`: what the drafter makes of the greedy token of row p, after a cold prompt and its first tokens;
    the same after either hand-off."""
    encoder, decoder, last = prompt.rank(prompt.encoder()), prompt.rank(), prompt.rank()
    _draft_rounds(c, "cold", prompt, prompt.rank(), start=0)
    full = last.receive(prompt.cold(), boundary=prompt.tokens, prompt_tokens=prompt.tokens, kind=SnapshotKind.FULL)
    _draft_rounds(c, "full", prompt, last, start=prompt.tokens, plan=full)
    boundary = encoder.boundaries.encoder_handoff(prompt.tokens)
    if boundary:
        encoder.compute(prompt.ids, 0, boundary, prompt_tokens=prompt.tokens)
        plan = decoder.receive(encoder, boundary=boundary, prompt_tokens=prompt.tokens, kind=SnapshotKind.ENCODER)
        _draft_rounds(c, "encoder", prompt, decoder, start=boundary, plan=plan)


def _draft_rounds(
    c: Comparison, label: str, prompt: _Prompt, rank: _Rank, *, start: int, plan: RestorePlan | None = None
) -> None:
    """Rows below `start` are there; compute those up to each recorded position, then draft."""
    vectors, floor = prompt.vectors.below("draft."), prompt.network.config.floor(prompt.tokens)
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for position in sorted(int(head.removeprefix("pos")) for head in vectors.heads()):
        if start <= position:
            rank.compute(prompt.ids, start, position + 1, prompt_tokens=prompt.tokens, plan=plan)
            start = position + 1
        wanted = vectors.below(f"pos{position}.")
        anchor = Anchor(0, start, int(wanted["output_ids"][0]), window_start=floor)
        got = draft_round(prompt.network, rank.caches, anchor)
        pairs.append((f"{label} pos{position}", got["base_logits"], wanted["base_logits"]))
        if not prompt.mode.quantised_caches:
            compare_round(c, f"{label} pos{position}", got, wanted)
    if pairs:
        compare_logits(c, pairs, prompt.mode)
    else:
        c.note("the vectors hold none")


def _check_chunks(c: Comparison, prompt: _Prompt) -> None:
    """Any chunking."""
    for chunk in CHUNKS:
        rank = prompt.rank()
        logits = rank.compute(prompt.ids, 0, prompt.tokens, prompt_tokens=prompt.tokens, chunk=chunk)
        decoded = rank.compute(prompt.ids, prompt.tokens, prompt.tokens + 1, prompt_tokens=prompt.tokens, chunk=chunk)
        pairs = [
            (f"chunks of {chunk}", logits, prompt.vectors["logits"]),
            (f"decode after chunks of {chunk}", decoded, prompt.vectors["decode_logits"][:1]),
        ]
        compare_logits(c, pairs, prompt.mode)


def _check_full_handoff(c: Comparison, prompt: _Prompt) -> None:
    """State of all layers at L."""
    rank = prompt.rank()
    plan = rank.receive(prompt.cold(), boundary=prompt.tokens, prompt_tokens=prompt.tokens, kind=SnapshotKind.FULL)
    prompt.continued(c, "full", rank, plan, steps=len(prompt.ids) - prompt.tokens)


def _check_encoder_handoff(c: Comparison, prompt: _Prompt) -> None:
    """State of the lower layers, from a rank that has no others: at its own boundary and at earlier ones."""
    group, last = prompt.network.config.group_tokens, prompt.rank().boundaries.encoder_handoff(prompt.tokens)
    boundaries = sorted({last, last // 2 - last // 2 % group, max(0, last - group)} - {0})
    if not boundaries:
        c.note("a prompt of at most K tokens leaves nothing to hand over")
    for boundary in boundaries:
        source, rank = prompt.rank(prompt.encoder()), prompt.rank()
        source.compute(prompt.ids, 0, boundary, prompt_tokens=prompt.tokens)
        plan = rank.receive(source, boundary=boundary, prompt_tokens=prompt.tokens, kind=SnapshotKind.ENCODER)
        prompt.continued(c, f"encoder at {boundary}", rank, plan)


def _check_mid_generation(c: Comparison, prompt: _Prompt) -> None:
    """A stream that moves after an odd and after an even number of tokens; then rows one by one, and at once."""
    for done in (3, 4):
        boundary = prompt.tokens + done
        source = prompt.cold()
        source.compute(prompt.ids, prompt.tokens, boundary, prompt_tokens=prompt.tokens, chunk=1)
        for chunk in (1, STEPS):
            rank = prompt.rank()
            plan = rank.receive(source, boundary=boundary, prompt_tokens=prompt.tokens, kind=SnapshotKind.FULL)
            logits = rank.compute(
                prompt.ids, boundary, boundary + STEPS, prompt_tokens=prompt.tokens, plan=plan, chunk=chunk
            )
            wanted = prompt.vectors["decode_logits"][done : done + STEPS]
            compare_logits(c, [(f"moved at {boundary}, {chunk} rows at once", logits, wanted)], prompt.mode)


def _check_hit_with_windows(c: Comparison, prompt: _Prompt) -> None:
    """A hit at R with the windows of another request that has the same prefix: nothing is replayed, and it is exact."""
    for boundary in prompt.hits():
        other, rank = prompt.rank(), prompt.rank()
        other.compute(prompt.ids, 0, boundary, prompt_tokens=boundary + prompt.network.config.kept_rows)
        plan = rank.receive(other, boundary=boundary, prompt_tokens=prompt.tokens, kind=SnapshotKind.ENCODER, own=False)
        prompt.continued(c, f"hit at {boundary}", rank, plan)


def _check_hit_with_replay(c: Comparison, prompt: _Prompt) -> None:
    """A hit at R without windows: W rows are replayed. Approximate by design, so the arrays are its own."""
    for boundary in prompt.hits():
        rank = prompt.rank()
        plan = rank.receive(prompt.cold(), boundary=boundary, prompt_tokens=prompt.tokens, fidelity=Fidelity.FAST)
        prompt.continued(c, f"hit at {boundary}", rank, plan, arrays=f"hit{boundary}.replay.")


def _check_crash(c: Comparison, prompt: _Prompt) -> None:
    """Recovery without a snapshot: prompt and tokens sent are a new prompt, with an L and an R of its own."""
    crash, length = prompt.vectors.below("crash."), prompt.tokens + CRASH_TOKENS
    rank = prompt.rank()
    logits = rank.compute(prompt.ids, 0, length, prompt_tokens=length)
    decoded = rank.compute(prompt.ids, length, length + STEPS, prompt_tokens=length, chunk=1)
    pairs = [("last row", logits[-1:], crash["last_logits"][None]), ("decode", decoded, crash["decode_logits"])]
    for head in crash.heads():
        if not head.startswith("hit"):
            continue
        boundary, again = int(head.removeprefix("hit")), prompt.rank()
        own = again.boundaries.hit(stored_tokens=length, prompt_tokens=length)
        c.equal("R of the new prompt", torch.tensor([own]), torch.tensor([boundary]))
        plan = again.receive(rank, boundary=boundary, prompt_tokens=length, fidelity=Fidelity.FAST)
        last = again.compute(prompt.ids, plan.start, length, prompt_tokens=length, plan=plan)[-1:]
        pairs.append((f"last row after a hit at {boundary}", last, crash[f"{head}.replay.last_logits"][None]))
    compare_logits(c, pairs, prompt.mode)


def _check_recovery(c: Comparison, prompt: _Prompt) -> None:
    """Recovery with the prompt's own L: the tokens sent are recomputed as decode rows, all at once."""
    rank = prompt.cold()
    logits = rank.compute(prompt.ids, prompt.tokens, prompt.tokens + CRASH_TOKENS, prompt_tokens=prompt.tokens)
    compare_logits(c, [("rows", logits, prompt.vectors["decode_logits"][:CRASH_TOKENS])], prompt.mode)


def _check_halo(c: Comparison, prompt: _Prompt) -> None:
    """In float64: replay of the halo gives what a cold request gives, one row fewer does not."""
    if prompt.mode.quantised_caches:
        c.note("rounding hides one row")
        return
    config = prompt.network.config
    halo = (config.last_kv_source + 1) * (config.window - 1)
    boundary = prompt.rank().boundaries.blocks(halo + 2) * prompt.block_tokens
    length = boundary + config.kept_rows
    ids = (prompt.ids * (length // len(prompt.ids) + 1))[:length]
    network = prompt.folder.network(prompt.mode, dtype=torch.float64)
    cold = _Rank.of(network, prompt.block_tokens, prompt.mode, tokens=length)
    wanted = cold.compute(ids, 0, length, prompt_tokens=length)
    for missing in (0, 1):
        rank = _Rank.of(network, prompt.block_tokens, prompt.mode, tokens=length)
        plan = rank.receive(cold, boundary=boundary, prompt_tokens=length)
        start = plan.start + missing
        got = rank.compute(
            ids, start, length, prompt_tokens=length, plan=replace(plan, start=start, window_start=start)
        )
        if not missing:
            c.floats(f"{plan.replayed_tokens} rows replayed", got, wanted, tolerance=HALO_TOLERANCE)
        elif torch.equal(got, wanted):
            c.fail(f"{plan.replayed_tokens - 1} replayed rows would be enough")


CHECKS: Mapping[str, Callable[[Comparison, _Prompt], None]] = {
    "cold": _check_cold,
    "drafts": _check_drafts,
    "chunks": _check_chunks,
    "hand-off full": _check_full_handoff,
    "hand-off encoder": _check_encoder_handoff,
    "mid-generation": _check_mid_generation,
    "hit, windows": _check_hit_with_windows,
    "hit, replay": _check_hit_with_replay,
    "crash": _check_crash,
    "crash, own L": _check_recovery,
    "halo": _check_halo,
}
"""By the words that a result's name ends with."""
