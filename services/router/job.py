"""One request as the router dispatches it, and what comes back.

Each choice of `n`, and each prompt of a list, is a job of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whalepod.cluster.registration import RankInfo
from whalepod.cluster.tickets import pack_ids, sign_ticket
from whalepod.cluster.wire import FIDELITIES, image_to_proto, sampling_to_proto
from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Clock, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.ids import RankId, RequestId
from whalepod.engine.images import RequestImage
from whalepod.engine.interface import Fidelity, FinishReason, SampledToken
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Job:
    """Validated: every rank that fits its length can run it."""

    request_id: RequestId
    model: str
    tenant: str
    salt: bytes
    prompt_ids: Sequence[int]
    block_hashes: Sequence[BlockHash]
    sampling: SamplingParams
    fidelity: Fidelity
    deadline: Deadline
    stored_tokens: int = 0
    """Longest stored prefix that the lookup saw: a guess."""
    resumed_ids: Sequence[int] = ()
    """Output that the client has already been sent."""
    traceparent: str = ""
    session: tuple[str, str] | None = None
    """Tenant and the client's name for the conversation."""
    wanted_rank: RankId | None = None
    """The decode rank that the client has named."""
    priority: int = 0
    """Smaller goes first."""
    branch: int = 0
    """Which choice of `n` it is."""
    branch_of: RequestId | None = None
    """Of a choice above 0: the job that is choice 0."""
    images: Sequence[RequestImage] = ()
    """Of the prompt, in order."""

    @property
    def tokens(self) -> int:
        """Of the prompt, and of the output so far."""
        return len(self.prompt_ids) + len(self.resumed_ids)

    @property
    def scores_prompt(self) -> bool:
        """The prompt's own log-probabilities are wanted: no stored prefix is used."""
        return self.sampling.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Route:
    """Who served a request. `prefill_rank` None: the decode rank computed the prompt."""

    decode_rank: RankId
    prefill_rank: RankId | None
    attempts: int


class Burst(NamedTuple):
    """The tokens of one engine step, or of several if their reader was late. `cached_tokens` is R, the prompt tokens
    that came from stored prefix."""

    tokens: tuple[SampledToken, ...]
    cached_tokens: int
    route: Route


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of the prompt's tokens from position `start` on, which were asked for: each once, in order, all
    before the first burst. Of choices that were computed together, choice 0 tells them for all."""

    start: int
    tokens: tuple[SampledToken, ...]
    cached_tokens: int
    route: Route


@dataclass(frozen=True, slots=True)
class Ending:
    """The last thing a job yields: it ended well."""

    reason: FinishReason
    matched_stop_id: int | None
    cached_tokens: int
    route: Route


Progress = Scores | Burst | Ending


def sign_job(
    job: Job,
    *,
    attempt: int,
    decode: RankInfo,
    prefill: RankInfo | None,
    vision: Sequence[RankInfo] = (),
    secret: ClusterSecret,
    clock: Clock,
) -> common_pb2.SignedTicket:
    """The ticket of one attempt. It is good for as long as the request may run. `vision`: who encodes images."""
    now_ms = clock.unix_ms()
    deadline_unix_ms = now_ms + int(1000 * job.deadline.remaining_s())
    ticket = common_pb2.Ticket(
        request_id=job.request_id,
        attempt=attempt,
        model=job.model,
        tenant=job.tenant,
        salt=job.salt,
        fidelity=FIDELITIES[job.fidelity],
        prompt_ids=pack_ids(job.prompt_ids),
        resumed_ids=pack_ids(job.resumed_ids),
        block_hashes=b"".join(job.block_hashes),
        sampling=sampling_to_proto(job.sampling),
        deadline_unix_ms=deadline_unix_ms,
        prefill_rank=prefill.rank_id if prefill is not None else "",
        decode_rank=decode.rank_id,
        expires_unix_ms=deadline_unix_ms,
        stored_tokens_hint=job.stored_tokens,
        traceparent=job.traceparent,
        priority=job.priority,
        branch=job.branch,
        branch_of=job.branch_of,
        images=map(image_to_proto, job.images),
        vision_ranks=[rank.address for rank in vision] if job.images else (),
        signed_unix_ms=now_ms,
    )
    return sign_ticket(ticket, secret)
