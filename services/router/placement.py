"""Which ranks run a request: a pure function of what is known when it is asked.

Decode rank first, then whether a remote prefill is worth it, then the prefill rank. Ranks whose load is nearly the same
are equals: of two equals drawn at random the less loaded one is taken, so that routers that share nothing do not all
choose the same rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId
from whalepod.engine.interface import Fidelity, RankLoad

NEARLY_EQUAL = 0.1
"""Loads that differ by less than this share of a rank are equals."""


class RemotePrefill(Enum):
    """When a prefill rank runs the prompt: where it pays, wherever there is one, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Policy(Enum):
    """`cache_aware` subtracts stored tokens from what a prompt costs, `least_loaded` ignores the store."""

    CACHE_AWARE = "cache_aware"
    LEAST_LOADED = "least_loaded"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank as the router sees it now. `requests_here` and `prefill_tokens_here` are this router's own work on it,
    counted from the moment of dispatch, so that a burst between two reports does not land on one rank."""

    rank_id: RankId
    load: RankLoad
    context_tokens_max: int
    fidelities: Collection[Fidelity]
    requests_here: int = 0
    prefill_tokens_here: int = 0

    def can_hold(self, tokens: int, fidelity: Fidelity) -> bool:
        return tokens <= self.context_tokens_max and fidelity in self.fidelities

    @property
    def busy_share(self) -> float:
        """Requests per slot; above 1 some wait. A report may be older than our own dispatches, never the reverse."""
        requests = max(self.load.running + self.load.waiting, self.requests_here)
        return requests / max(1, self.load.slots_total)

    @property
    def blocks_used_share(self) -> float:
        return 1 - self.load.blocks_free / self.load.blocks_total if self.load.blocks_total else 0.0

    @property
    def prefill_tokens_queued(self) -> int:
        return max(self.load.prefill_tokens_queued, self.prefill_tokens_here)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """`stored_tokens` is the longest stored prefix the lookup saw. `avoid` names ranks that failed this request: they
    are taken only if nobody else is there."""

    prompt_tokens: int
    stored_tokens: int
    fidelity: Fidelity
    avoid: Collection[RankId] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode rank computes the prompt itself."""

    decode: RankId
    prefill: RankId | None


def plan_placement(
    request: PlacementRequest,
    *,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    remote_prefill: RemotePrefill,
    remote_prefill_tokens_min: int,
    rng: Random,
    policy: Policy = Policy.CACHE_AWARE,
) -> Placement:
    """Choose ranks; changes nothing but `rng`. Raises UnavailableError if no decode rank can hold the request."""
    able = _usable(decode, request, tokens=request.prompt_tokens + 1)
    if not able:
        raise UnavailableError("no decode rank can take this request now")
    decode_rank = _two_choice(able, key=lambda rank: rank.busy_share + rank.blocks_used_share, rng=rng)

    stored = request.stored_tokens if policy is Policy.CACHE_AWARE else 0
    new_tokens = request.prompt_tokens - stored
    worth_it = remote_prefill is RemotePrefill.ALWAYS or (
        remote_prefill is RemotePrefill.AUTO and new_tokens >= remote_prefill_tokens_min
    )
    helpers = _usable(prefill, request, tokens=request.prompt_tokens) if worth_it else []
    if not helpers:
        return Placement(decode=decode_rank.rank_id, prefill=None)
    # Queued tokens in units of this prompt: a queue shorter than a tenth of it makes no difference worth chasing.
    prefill_rank = _two_choice(
        helpers, key=lambda rank: rank.prefill_tokens_queued / max(1, new_tokens) + rank.busy_share, rng=rng
    )
    return Placement(decode=decode_rank.rank_id, prefill=prefill_rank.rank_id)


def _usable(ranks: Sequence[Candidate], request: PlacementRequest, *, tokens: int) -> list[Candidate]:
    able = [rank for rank in ranks if rank.can_hold(tokens, request.fidelity)]
    preferred = [rank for rank in able if rank.rank_id not in request.avoid]
    return preferred or able


def _two_choice(ranks: Sequence[Candidate], *, key: Callable[[Candidate], float], rng: Random) -> Candidate:
    lowest = min(key(rank) for rank in ranks)
    equals = [rank for rank in ranks if key(rank) <= lowest + NEARLY_EQUAL]
    return min(rng.sample(equals, min(2, len(equals))), key=key)
