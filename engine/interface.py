"""What goes into a rank and what comes out of it. Services translate these to and from protobuf; nobody passes
protobuf down.

    submit(EngineRequest) ──▶ rank ──▶ on_step([TokensEvent | … | FinishedEvent, …]), once a step

Every accepted request ends with exactly one `FinishedEvent`, after all its other events, unless it was cancelled: then
nothing is reported after `cancel` has been acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Deadline
from whalepod.core.errors import ServingError
from whalepod.core.ids import RequestId

from .images import RequestImage
from .sampling_params import SamplingParams
from .speculation.statistics import SpeculationWork


class Fidelity(Enum):
    """`fast`: approximate where upstream is. `exact`: same tokens whatever the cache holds (`design.md` §4)."""

    FAST = "fast"
    EXACT = "exact"


class Work(Enum):
    GENERATE = "generate"
    """Compute what is missing of the prompt, then generate."""
    PREFILL = "prefill"
    """Compute the prompt, publish blocks and a hand-off snapshot, report a `HandoffEvent`."""


class SnapshotKind(Enum):
    FULL = "full"
    ENCODER = "encoder"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt at one request on one rank. Validated: a rank may still refuse it for its own limits."""

    request_id: RequestId
    attempt: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    fidelity: Fidelity
    deadline: Deadline
    work: Work = Work.GENERATE
    await_handoff: bool = False
    """GENERATE only: hold a soft slot and wait for `hand_off` before computing anything."""
    chain_root: BlockHash | None = None
    """Root of the block-hash chain (namespace and salt are in it). None: the request shares no prefix and stores
    none."""
    block_hashes: Sequence[BlockHash] = ()
    """Hashes of the prompt's full blocks; those of `resumed_ids` follow from them."""
    owner: int = 0
    """64 bits: on whose account its blocks are stored (`kvstore.store_keys.owner_tag`); 0: nobody's."""
    stored_tokens: int = 0
    """Leading tokens whose blocks the router saw in the store: they may be fetched before the hand-off is there."""
    resumed_ids: Sequence[int] = ()
    """Output that was drawn before, on a rank that is gone or let the request go: it goes on with the token after
    them. `exact`: as if nothing had happened. `fast`: they count as prompt (L grows), which is approximate."""
    traceparent: str = ""
    """The span (`core/tracing.py`) that this work belongs to; empty: none."""
    noise_key: int | None = None
    """64-bit key of the sampling noise if `sampling.seed` is None (`runtime.md` §4.4)."""
    priority: int = 0
    """Smaller goes first: it is admitted before requests that came earlier, and preempted after them."""
    branch: int = 0
    """Which of the choices of one prompt (`n`) this is: each has noise of its own."""
    branch_of: RequestId | None = None
    """Of a choice above 0: the request that is choice 0. Where both meet before its prompt is computed, it is computed
    once for both, and they share its blocks."""
    images: Sequence[RequestImage] = ()
    """Of the prompt, in order. Every id of their spans is the image token's."""
    vision_ranks: Sequence[str] = ()
    """Addresses of ranks that can encode them, the best first."""


class SampledToken(NamedTuple):
    """A token that was drawn, or one of the prompt. `logprob` is its log-softmax over the raw logits, float32, present
    if asked for."""

    id: int
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill rank leaves behind, and what a decode rank is told about it."""

    boundary_tokens: int
    """n of the snapshot; 0: nothing was published, the decode rank computes the prompt."""
    kind: SnapshotKind | None
    first_token: SampledToken | None = None
    """Kind `full` only: the token at position L."""
    finish_reason: FinishReason | None = None
    """Set if the first token already ended the request."""
    matched_stop_id: int | None = None
    cached_tokens: int = 0
    replayed_tokens: int = 0
    blocks_stored: int = 0
    exact: bool = True
    stored: bool = True
    """False: the store did not take the snapshot or a block; the decode rank must compute the prompt."""
    prefilled: bool = True
    """False: no prefill rank has computed the prompt, and nothing that is found of it was stored for this request."""
    direct_address: str = ""
    """`host:port` where the prefill rank serves what it has published to other ranks; empty: it does not."""

    def hit_of(self, restored_tokens: int) -> int:
        """How many of the tokens that a decode rank has restored without the snapshot others had stored. What the
        prefill rank has put there is no hit, whether or not the store has said that it took it."""
        return min(restored_tokens, self.cached_tokens) if self.prefilled else restored_tokens


class TokensEvent(NamedTuple):
    request_id: RequestId
    attempt: int
    tokens: tuple[SampledToken, ...]
    cached_tokens: int | None = None
    """R of this request. At least its first event says it: a client's stop string ends the request without a
    `FinishedEvent`, and usage is still told truthfully. For a request that was handed off, the prefill rank's R."""


@dataclass(frozen=True, slots=True)
class PromptTokensEvent:
    """Tokens of the prompt from position `start` on with their log-probabilities, which were asked for by
    `SamplingParams.prompt_logprobs`: once each, in order, all before the request's first `TokensEvent`. Of choices that
    meet (`branch_of`), choice 0 reports them for all."""

    request_id: RequestId
    attempt: int
    start: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class HandoffEvent:
    """Everything it names is stored. Its `FinishedEvent` follows at once: the reason is the hand-off's, or STOP."""

    request_id: RequestId
    attempt: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class FinishedEvent:
    request_id: RequestId
    attempt: int
    reason: FinishReason
    error: ServingError | None = None
    """Set iff `reason` is ERROR."""
    matched_stop_id: int | None = None
    cached_tokens: int = 0
    replayed_tokens: int = 0


StepEvent = TokensEvent | PromptTokensEvent | HandoffEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computed: rows of requests that generate, verified drafts among them, and rows of prompts (replayed
    ones too)."""

    decode_rows: int = 0
    prompt_rows: int = 0
    seconds: float = 0.0
    speculation: SpeculationWork | None = None
    """None: nothing was drafted."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A rank's load at one moment."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_total: int = 0
    prefill_tokens_queued: int = 0
    slots_total: int = 0


@dataclass(frozen=True, slots=True)
class RankLimits:
    """What a rank can hold; known after start."""

    context_tokens_max: int
    slots_total: int
    block_tokens: int
    namespace: bytes
    layout: str
    fidelities: tuple[Fidelity, ...] = field(default=(Fidelity.FAST, Fidelity.EXACT))
