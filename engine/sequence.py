"""A request while it lives on a rank: its tokens, what of its state is computed, and what it holds."""

from __future__ import annotations

import collections.abc
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from whalepod.core.block_keys import BlockHash, BlockKey, block_key, derive_block_hashes
from whalepod.core.lifecycle import Lifecycle, Outcome, Phase

from .block_pool import Slot
from .boundaries import Boundaries
from .finish import FinishRule
from .grammar.state import GrammarState
from .images import block_extras
from .interface import EngineRequest, Fidelity, Handoff, SampledToken, Work
from .parking import Parked
from .prompt_scores import PromptScores
from .restore import RestorePlan
from .sampling import Sampler, noise_key
from .state_store import Owner

_COMPUTING = (Phase.PREFILLING, Phase.DECODING)


@dataclass(slots=True)
class Leaving:
    """A prompt is computed, and its hand-off is being written."""

    first_token: SampledToken | None
    snapshot_sent: bool = False


@dataclass(slots=True)
class Prefetch:
    """Stored blocks in host memory, from `first_block` on, for a sequence that awaits its hand-off."""

    first_block: int
    blocks_reserved: int
    payloads: collections.abc.Sequence[memoryview] = ()
    exact: collections.abc.Sequence[bool] = ()


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, owned by the engine's thread.

    Between steps, rows 0 … computed - 1 have their state on the device (if the sequence holds a slot), and tokens up to
    `len(tokens)` are known. `prompt_tokens` is L for the whole life of the request, also after a preemption.

    A request that goes on after output of another rank has it among its tokens. If it is exact, L is that of its
    prompt, and the output is computed as the rows that it was; if not, output so far is prompt.
    """

    request: EngineRequest
    arrival: int
    """Order of acceptance."""
    prompt_tokens: int
    rows_end: int
    """Rows that are to be computed before the next token, or the hand-off, is due."""
    tokens: list[int]
    """Prompt and output."""
    hashes: list[BlockHash]
    """Of the full blocks, as far as they are known; empty if the request shares no prefix."""
    sampler: Sampler
    finish_rule: FinishRule
    floor: int = 0
    """Its first row above the last KV source (`ModelConfig.floor`); 0: none is left out."""

    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    phase: Phase = Phase.WAITING
    """Of `lifecycle`, with which it changes."""
    awaiting: bool = False
    """Holds a soft slot until its hand-off is known."""
    compiling: bool = False
    """Its grammar is not ready."""
    following: Sequence | None = None
    """It waits for this one to compute the prompt of both (`branching.py`)."""
    followers: list[Sequence] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    """Log-probabilities of its prompt, if they were asked for."""
    grammar: GrammarState | None = None
    """Where it stands in its grammar: all of its output has been followed."""
    handoff: Handoff | None = None
    prefetch: Prefetch | None = None
    parked: Parked | None = None

    slot: Slot | None = None
    blocks: tuple[int, ...] = ()
    computed: int = 0
    rows_in_flight: int = 0
    """Rows from `computed` on that are launched."""
    steps_in_flight: int = 0
    """Launched steps that hold rows of it. While there are any, what it holds stays its own."""
    drawing: int = 0
    """Tokens behind `tokens` that are being drawn, at least: one in each step."""
    drafts_in_flight: int = 0
    """Drafts behind the rows in flight, at most: as many more tokens may turn out to have been drawn."""
    window_start: int = 0
    write_start: int = 0
    exact: bool = True
    """Nothing approximate is in the state computed here. Never for a `fast` request, whose rows depend on their
    neighbours in the last bits."""
    windows_exact_from: int = 0
    """Window rows up to the last KV source are exact from here on, for any request with this prefix."""
    resumed: bool = False
    """It was preempted: what it meets again must be exact (`design.md` §4)."""
    restored_tokens: int = 0
    """The boundary of the last restore: rows below it were not first computed here."""
    blocks_exact: list[bool] = field(default_factory=list)
    """One flag for each leading block that is full of computed or loaded rows."""
    blocks_published: int = 0
    """Leading blocks that are stored, or whose writing was decided."""
    entrusted: dict[int, Future[bool]] = field(default_factory=dict)
    """By depth: blocks that other ranks of the group write, and whether the store has them. The device adds those of
    rows that are launched."""
    leaving: Leaving | None = None
    """A prefilled prompt whose state is being stored."""
    spans: dict[int, Tensor] = field(default_factory=dict)
    """Rows of images [tokens, D] that are here, by where they begin."""
    spans_coming: set[bytes] = field(default_factory=set)
    """Content of images whose rows are being fetched."""
    extras: collections.abc.Mapping[int, bytes] = field(default_factory=dict)
    """By depth: what the names of blocks that images touch hold beside tokens."""

    cached_tokens: int | None = None
    """R, known after the first restore."""
    replayed_tokens: int = 0

    is_prefill: bool = field(init=False)
    shares_prefix: bool = field(init=False)
    shows_images: bool = field(init=False)
    tokens_max: int = field(init=False)
    """Prompt and output, when it surely has ended."""

    def __post_init__(self) -> None:
        self.is_prefill = self.request.work is Work.PREFILL
        self.shares_prefix = self.request.chain_root is not None
        self.shows_images = bool(self.request.images)
        self.tokens_max = self.finish_rule.tokens_max

    @property
    def owner(self) -> Owner:
        """Names this holding of a slot. The sequence must hold one."""
        assert self.slot is not None
        return Owner(self.request.request_id, self.request.attempt, self.slot.generation)

    @property
    def turn(self) -> tuple[int, int]:
        """Smaller ones come first everywhere: by priority, then by arrival."""
        return self.request.priority, self.arrival

    @property
    def admissible(self) -> bool:
        """Nothing that it waits for is outstanding, except room."""
        return not self.awaiting and not self.compiling and self.following is None

    @property
    def output_ids(self) -> collections.abc.Sequence[int]:
        return self.tokens[len(self.request.prompt_ids) :]

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def rows_pending(self) -> int:
        return self.rows_end - self.computed

    @property
    def launched(self) -> int:
        """Rows 0 … launched - 1 are computed or on their way, even if no draft in flight stands."""
        return self.computed + self.rows_in_flight

    @property
    def rows_to_launch(self) -> int:
        """Rows that could be launched now, taking for granted that the token on its way does not end the request. Where
        it surely does, there are none."""
        drawing = self.drawing
        if drawing and (self.is_prefill or len(self.tokens) + drawing >= self.tokens_max):
            return 0
        rows = self.rows_end + drawing - self.computed - self.rows_in_flight
        return rows if not self.shows_images else min(rows, self.rows_ready - self.launched)

    @property
    def rows_ready(self) -> int:
        """Rows below this have all that they are computed from: the first span that is missing begins here."""
        missing = (
            image.start for image in self.request.images if image.end > self.launched and image.start not in self.spans
        )
        return next(missing, self.rows_end + self.drawing)

    @property
    def decodes(self) -> bool:
        """Its next row is that of a drawn token."""
        return self.phase is Phase.DECODING or self.drawing > 0

    @property
    def computes(self) -> bool:
        """The next step could compute rows of it."""
        return self.phase in _COMPUTING and self.rows_to_launch > 0

    @property
    def ended(self) -> bool:
        return self.phase is Phase.DONE

    @property
    def truncates(self) -> bool:
        """Upper layers run on its kept rows only."""
        return self.prompt_scores is None

    @property
    def handoff_unread(self) -> bool:
        """A snapshot was announced and may still be in the store."""
        return self.handoff is not None and self.handoff.boundary_tokens > 0

    @property
    def fidelity(self) -> Fidelity:
        return Fidelity.EXACT if self.resumed else self.request.fidelity

    def advance(self, phase: Phase) -> None:
        if self.phase is not phase:
            self.lifecycle = self.lifecycle.advance(phase)
            self.phase = phase

    def finish(self, outcome: Outcome) -> None:
        self.lifecycle = self.lifecycle.finish(outcome)
        self.phase = self.lifecycle.phase

    def resume_from(self, plan: RestorePlan) -> None:
        """Rows below the plan's start are as if they had been computed here."""
        self.computed = plan.start
        self.restored_tokens = plan.boundary
        self.window_start = plan.window_start
        self.write_start = plan.write_start
        kept = self.windows_exact_from if self.parked is not None else 0
        self.windows_exact_from = max(kept, plan.windows_exact_from)
        self.exact = plan.exact and self.request.fidelity is Fidelity.EXACT

    def extend(self, token_ids: collections.abc.Sequence[int]) -> None:
        """Tokens were drawn, here or by the rank before; the sampler knows of them."""
        self.tokens += token_ids
        self.rows_end = len(self.tokens)

    def hash_of(self, depth: int, *, block_tokens: int) -> BlockHash:
        """Hash of a full block whose tokens are known. Generated blocks carry on the prompt's chain."""
        root = self.request.chain_root
        assert root is not None
        while len(self.hashes) <= depth:
            number = len(self.hashes)
            start = number * block_tokens
            parent = self.hashes[-1] if self.hashes else root
            # An image may reach into the block that the answer begins in.
            extras = {0: self.extras[number]} if number in self.extras else None
            self.hashes += derive_block_hashes(
                self.tokens[start : start + block_tokens], root=parent, block_tokens=block_tokens, extras=extras
            )
        return self.hashes[depth]

    def key_of(self, depth: int, *, block_tokens: int) -> BlockKey:
        """As `hash_of`."""
        self.hash_of(depth, block_tokens=block_tokens)
        root = self.request.chain_root
        assert root is not None
        return block_key(self.hashes, depth, root=root)


def new_sequence(
    request: EngineRequest,
    *,
    arrival: int,
    boundaries: Boundaries,
    draws: bool,
    context_tokens_max: int,
) -> Sequence:
    """An accepted request that holds nothing yet. `draws`: the rank holds all layers."""
    tokens = len(request.prompt_ids) + len(request.resumed_ids)
    length = len(request.prompt_ids) if request.fidelity is Fidelity.EXACT else tokens
    hands_off_early = request.work is Work.PREFILL and not draws
    eos_id = boundaries.config.eos_token_id
    scored = request.sampling.prompt_logprobs
    sequence = Sequence(
        request=request,
        arrival=arrival,
        prompt_tokens=length,
        rows_end=boundaries.encoder_handoff(length) if hands_off_early else tokens,
        floor=boundaries.config.floor(length) if scored is None else 0,
        tokens=[*request.prompt_ids, *request.resumed_ids],
        hashes=list(request.block_hashes) if request.chain_root is not None else [],
        sampler=Sampler(
            request.sampling,
            key=noise_key(request),
            eos_id=eos_id,
            prompt_ids=request.prompt_ids,
            output_ids=request.resumed_ids,
        ),
        finish_rule=FinishRule(
            params=request.sampling,
            prompt_tokens=len(request.prompt_ids),
            context_tokens_max=context_tokens_max,
            eos_id=eos_id,
        ),
        awaiting=request.await_handoff,
        prompt_scores=None if scored is None else PromptScores(request.prompt_ids, top=scored),
        extras=block_extras(request.images, block_tokens=boundaries.block_tokens),
    )
    if sequence.prompt_scores is not None and request.resumed_ids:
        sequence.prompt_scores.leave_to_another()  # they were told before the first token was drawn
    full_blocks = tokens // boundaries.block_tokens
    if sequence.shares_prefix and len(sequence.hashes) < full_blocks:
        sequence.hash_of(full_blocks - 1, block_tokens=boundaries.block_tokens)
    return sequence
