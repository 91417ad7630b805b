"""Which ranks run a request: a pure function of what is known when it is asked, so that a trace can be replayed.

    prompt, stored prefix, session's rank │ each rank's load │ measured costs ──▶ decode rank, prefill rank or none

Decode rank first: the one that holds the conversation's state, unless another is clearly less loaded. Then whether a
remote prefill is worth it: computing the prompt on the decode rank delays every stream there, a prefill rank may have
a queue and its state has to be fetched. Then the prefill rank with the shortest queue. Of ranks whose load is the same
two are drawn at random and the better one is taken, so that routers that share nothing do not all choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId
from whalepod.engine.interface import Fidelity, RankLoad

HOT_SLACK = 0.125
"""A rank that holds a conversation's state is taken although another is less loaded by this share of its slots."""

QUEUE_SLACK = 0.1
"""Prefill queues that differ by less than this share of a prompt are the same."""

LOCAL_PENALTY = 1.25
"""A prompt row on a decode rank is worth so many on a prefill rank: streams wait for it."""


UNMEASURED_LOCAL = 3.0
"""Before any prompt was computed on a decode rank, a row there is taken to cost so many on a prefill rank."""


class RemotePrefill(Enum):
    """When a prefill rank runs the prompt: where it pays, wherever there is one, or never."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Policy(Enum):
    """`kv` weighs stored prefix, hot state and load. The others are there to be compared with it, and ignore the
    store."""

    KV = "kv"
    LEAST_LOADED = "least-loaded"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Costs:
    """What work takes here, in seconds, as measured. None: nothing has been measured."""

    remote_s_per_token: float | None = None
    """A prompt row on a prefill rank, from dispatch to READY, queue included."""
    local_s_per_token: float | None = None
    """A prompt row on a decode rank, to the first token."""
    handoff_s: float = 0.0
    """From READY to the first token."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank as the router sees it now. `…_here` is this router's own work on it, counted from the moment of
    dispatch; `…_elsewhere` is that of other routers: what the rank's last report said beyond ours."""

    rank_id: RankId
    load: RankLoad
    context_tokens_max: int
    fidelities: Collection[Fidelity]
    requests_here: int = 0
    prefill_tokens_here: int = 0
    requests_elsewhere: int = 0
    prefill_tokens_elsewhere: int = 0
    decode_load: float = field(init=False)
    """Requests per slot; a rank without blocks counts as a full one."""
    prefill_tokens_queued: int = field(init=False)

    def __post_init__(self) -> None:
        full = 1.0 if self.blocks_used_share > BLOCKS_USED_MAX else 0.0
        object.__setattr__(self, "decode_load", self.busy_share + full)
        object.__setattr__(self, "prefill_tokens_queued", self.prefill_tokens_here + self.prefill_tokens_elsewhere)

    def can_hold(self, tokens: int, fidelity: Fidelity) -> bool:
        return tokens <= self.context_tokens_max and fidelity in self.fidelities

    @property
    def busy_share(self) -> float:
        """Requests per slot; above 1 some wait."""
        return (self.requests_here + self.requests_elsewhere) / max(1, self.load.slots_total)

    @property
    def blocks_used_share(self) -> float:
        return 1 - self.load.blocks_free / self.load.blocks_total if self.load.blocks_total else 0.0


BLOCKS_USED_MAX = 0.95
"""A rank with more of its blocks in use would have to preempt somebody."""


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """`stored_tokens` is the longest stored prefix that is known. `hot_rank` holds the state of the conversation.
    `beside` is where the other choices of the same prompt went. `avoid` names ranks that failed this request: they are
    taken only if nobody else is there. `turn` counts requests, for round robin."""

    prompt_tokens: int
    stored_tokens: int
    fidelity: Fidelity
    avoid: Collection[RankId] = ()
    hot_rank: RankId | None = None
    wanted_rank: RankId | None = None
    """The client has named its decode rank: it is taken while it can hold the request."""
    beside: Placement | None = None
    turn: int = 0

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.stored_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` None: the decode rank computes the prompt itself."""

    decode: RankId
    prefill: RankId | None


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """What an operator has chosen."""

    policy: Policy = Policy.KV
    remote_prefill: RemotePrefill = RemotePrefill.AUTO
    remote_prefill_tokens_min: int = 64
    """`auto`: a prompt with fewer rows to compute is computed where it is decoded, unless rows queue there."""


def plan_placement(
    request: PlacementRequest,
    *,
    decode: Sequence[Candidate],
    prefill: Sequence[Candidate],
    rules: PlacementRules,
    costs: Costs,
    rng: Random,
) -> Placement:
    """Choose ranks; changes nothing but `rng`. Raises UnavailableError if no decode rank can hold the request."""
    able = _usable(decode, request, tokens=request.prompt_tokens + 1)
    if not able:
        raise UnavailableError("no decode rank can take this request now")
    helpers = _usable(prefill, request, tokens=request.prompt_tokens)
    if request.beside is not None and _still_there(request.beside, able, helpers):
        return request.beside
    wanted = next((rank for rank in able if rank.rank_id == request.wanted_rank), None)
    decode_rank = wanted or _choose_decode(able, request, policy=rules.policy, rng=rng)
    may_choose = wanted is None and rules.policy is Policy.KV
    local_rank = _shortest_prompt_queue(able, decode_rank) if may_choose else decode_rank
    if not helpers or not _worth_it(request, local_rank, helpers, rules=rules, costs=costs):
        return Placement(decode=local_rank.rank_id, prefill=None)
    prefill_rank = _choose_prefill(helpers, request, policy=rules.policy, rng=rng)
    return Placement(decode=decode_rank.rank_id, prefill=prefill_rank.rank_id)


def _usable(ranks: Sequence[Candidate], request: PlacementRequest, *, tokens: int) -> list[Candidate]:
    able = [rank for rank in ranks if rank.can_hold(tokens, request.fidelity)]
    if not request.avoid:
        return able
    preferred = [rank for rank in able if rank.rank_id not in request.avoid]
    return preferred or able


def _still_there(placement: Placement, decode: Sequence[Candidate], prefill: Sequence[Candidate]) -> bool:
    """Choices of one prompt are best together: the rank computes it once."""
    names = {rank.rank_id for rank in prefill} | {None}
    return placement.decode in {rank.rank_id for rank in decode} and placement.prefill in names


def _choose_decode(ranks: Sequence[Candidate], request: PlacementRequest, *, policy: Policy, rng: Random) -> Candidate:
    match policy:
        case Policy.RANDOM:
            return rng.choice(ranks)
        case Policy.ROUND_ROBIN:
            return _in_turn(ranks, request.turn)
        case Policy.KV | Policy.LEAST_LOADED:
            best = _two_choice(ranks, key=lambda rank: rank.decode_load, slack=0.0, rng=rng)
    hot = next((rank for rank in ranks if rank.rank_id == request.hot_rank), None)
    if policy is Policy.KV and hot is not None and hot.decode_load <= best.decode_load + HOT_SLACK:
        return hot
    return best


def _shortest_prompt_queue(ranks: Sequence[Candidate], chosen: Candidate) -> Candidate:
    """Where a prompt would be computed first, among decode ranks that are as good as the one chosen."""
    as_good = [rank for rank in ranks if rank.decode_load <= chosen.decode_load + HOT_SLACK]
    best = min(as_good, key=lambda rank: rank.prefill_tokens_queued)
    return best if best.prefill_tokens_queued < chosen.prefill_tokens_queued else chosen


def _choose_prefill(ranks: Sequence[Candidate], request: PlacementRequest, *, policy: Policy, rng: Random) -> Candidate:
    match policy:
        case Policy.RANDOM:
            return rng.choice(ranks)
        case Policy.ROUND_ROBIN:
            return _in_turn(ranks, request.turn)
        case Policy.KV:
            slack = QUEUE_SLACK * request.new_tokens
            return _two_choice(ranks, key=lambda rank: rank.prefill_tokens_queued, slack=slack, rng=rng)
        case Policy.LEAST_LOADED:
            return _two_choice(ranks, key=lambda rank: rank.busy_share, slack=0.0, rng=rng)


def _worth_it(
    request: PlacementRequest,
    decode_rank: Candidate,
    helpers: Sequence[Candidate],
    *,
    rules: PlacementRules,
    costs: Costs,
) -> bool:
    """Whether a prefill rank is to run the prompt."""
    if rules.remote_prefill is not RemotePrefill.AUTO:
        return rules.remote_prefill is RemotePrefill.ALWAYS
    new_tokens = request.new_tokens if rules.policy is Policy.KV else request.prompt_tokens
    if new_tokens + decode_rank.prefill_tokens_queued < rules.remote_prefill_tokens_min:
        return False
    if costs.remote_s_per_token is None:
        return new_tokens >= rules.remote_prefill_tokens_min
    local_s_per_token = costs.local_s_per_token or UNMEASURED_LOCAL * costs.remote_s_per_token
    queue = min(rank.prefill_tokens_queued for rank in helpers)
    remote_s = (queue + new_tokens) * costs.remote_s_per_token + costs.handoff_s
    local_s = (decode_rank.prefill_tokens_queued + new_tokens) * local_s_per_token
    return remote_s <= LOCAL_PENALTY * local_s


def _in_turn(ranks: Sequence[Candidate], turn: int) -> Candidate:
    return sorted(ranks, key=lambda rank: rank.rank_id)[turn % len(ranks)]


def _two_choice(
    ranks: Sequence[Candidate], *, key: Callable[[Candidate], float], slack: float, rng: Random
) -> Candidate:
    values = [key(rank) for rank in ranks]
    bound = min(values) + slack
    equals = [index for index, value in enumerate(values) if value <= bound]
    count = len(equals)
    if count == 1:
        return ranks[equals[0]]
    first = int(count * rng.random())
    second = (first + 1 + int((count - 1) * rng.random())) % count
    return ranks[min(equals[first], equals[second], key=values.__getitem__)]
