"""What the HTTP and the gRPC front share: the served model, limits, jobs, and the stream of a job's tokens.

body ─▶ prompt ids ─▶ FrontDoor.jobs (lengths, block hashes, lookup) ─▶ admission ─▶ FrontDoor.run ─▶ tokens
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from whalepod.core.block_keys import BlockHash, chain_root, derive_block_hashes
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ContextLengthError, InvalidFieldError, ModelNotFoundError, UnavailableError
from whalepod.core.ids import RankId, mint_request_id
from whalepod.core.tracing import span
from whalepod.engine.images import RequestImage, block_extras
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import SamplingParams
from whalepod.kvstore.store_keys import owner_tag
from whalepod.model.vision.preparation import PlacedImage

from .admission import Admission, Visit
from .dispatch import Dispatcher
from .job import Burst, Job, Progress
from .language import Language
from .prefix_lookup import PrefixLookup
from .rank_table import RankTable
from .relay import Relay
from .request_state import RequestState, Stage
from .router_metrics import (
    ACTUAL_HIT_TOKENS,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    FIRST_TOKEN_SECONDS,
    INTER_TOKEN_SECONDS,
    PREDICTED_HIT_TOKENS,
    PROMPT_TOKENS,
)
from .tenancy import Principal, sharing_salt

SESSION_CHARS_MAX = 256

DOMAINS_MAX = 4096
"""Sharing domains whose salts are remembered; then it begins anew."""

HASH_INLINE_TOKENS_MAX = 16_384
"""Shorter prompts are hashed on the event loop: a few hundred microseconds."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What this router serves, and with which defaults."""

    name: str
    context_tokens_max: int
    """The model's, or what the operator allows of it. A pool's ranks may hold less."""
    block_tokens: int
    fidelity_default: Fidelity = Fidelity.FAST
    fidelities: tuple[Fidelity, ...] = (Fidelity.FAST, Fidelity.EXACT)
    request_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and when the request came in (monotonic seconds)."""

    principal: Principal
    arrived_s: float
    deadline: Deadline
    traceparent: str = ""
    session: str | None = None
    """The client's name for a conversation: its turns are best served where its state is."""
    wanted_rank: RankId | None = None
    """The decode rank that the client has named."""
    state: RequestState = field(default_factory=RequestState)
    """Moves as the request does."""

    def on_behalf_of(self, user: str | None) -> Caller:
        """The same for one of its users."""
        principal = self.principal.on_behalf_of(user)
        return self if principal is self.principal else replace(self, principal=principal)


class FrontDoor:
    """For one event loop."""

    def __init__(
        self,
        model: ServedModel,
        *,
        language: Language,
        table: RankTable,
        dispatcher: Dispatcher,
        admission: Admission,
        lookup: PrefixLookup,
        secret: ClusterSecret,
        purge_epoch: Callable[[str], int] = lambda _: 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`purge_epoch`: of a tenant's last purge."""
        self._purge_epoch = purge_epoch
        self.model = model
        self.language = language
        self.table = table
        self.admission = admission
        self.lookup = lookup
        self.clock = clock
        self._dispatcher = dispatcher
        self._secret = secret
        self._domains: dict[tuple[str, str, str | None, int, bytes], tuple[bytes, BlockHash]] = {}

    @property
    def context_tokens_max(self) -> int:
        """Longest prompt plus answer that some decode rank can hold now."""
        held = self.table.context_tokens_max
        return self.model.context_tokens_max if held is None else min(self.model.context_tokens_max, held)

    def caller(
        self,
        principal: Principal,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
        session: str | None = None,
        wanted_rank: RankId | None = None,
    ) -> Caller:
        """A caller whose request arrives now. A client's own deadline only ever shortens ours."""
        limit_s = self.model.request_timeout_s
        deadline = Deadline.after(limit_s if timeout_s is None else min(limit_s, timeout_s), self.clock)
        return Caller(principal, self.clock.monotonic_s(), deadline, traceparent, session or None, wanted_rank)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless `name` is unset or the served model's."""
        if name and name != self.model.name:
            raise ModelNotFoundError(name, self.model.name)

    def check_fidelity(self, fidelity: Fidelity) -> None:
        """Raises InvalidFieldError if this cluster does not offer it."""
        if fidelity not in self.model.fidelities:
            allowed = ", ".join(offered.value for offered in self.model.fidelities)
            raise InvalidFieldError("fidelity", f"fidelity must be one of {allowed}, not {fidelity.value}")

    def check_length(self, prompt_tokens: int, max_tokens: int, *, field: str = "prompt") -> None:
        """Raises ContextLengthError if prompt and answer do not fit, or no room is left for one token."""
        needed = prompt_tokens + max(1, max_tokens)
        if needed > self.context_tokens_max:
            raise ContextLengthError(tokens=needed, tokens_max=self.context_tokens_max, field=field)

    @asynccontextmanager
    async def admitted(self, caller: Caller, *, choices: int, priority: int = 0) -> AsyncGenerator[None, None]:
        """As of `Admission`, for so many choices."""
        principal = caller.principal
        visit = Visit(choices, caller.deadline, tenant=principal.tenant, priority=principal.priority(priority))
        caller.state.stage = Stage.QUEUED
        with span("queue", caller.traceparent):
            started_s = await self.admission.enter(visit)
        caller.state.stage = Stage.PROMPT
        try:
            yield
        finally:
            self.admission.leave(visit, started_s)

    async def jobs(
        self,
        caller: Caller,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        fidelity: Fidelity,
        priority: int = 0,
        cache_salt: str | None = None,
        choices: int = 1,
        field: str = "prompt",
        images: Sequence[PlacedImage] = (),
    ) -> list[Job]:
        """One job for each choice. The prompt is hashed and looked up once; `images` are part of its blocks' names.

        Raises ContextLengthError and InvalidFieldError before any rank is touched, UnavailableError if there is none.
        """
        assert sampling.max_tokens is not None
        self.check_fidelity(fidelity)
        self.check_length(len(prompt_ids), sampling.max_tokens, field=field)
        if sampling.bad_words:
            sampling = await self.language.with_bad_word_ids(sampling)
        self.admission.charge_tokens(caller.principal.tenant, len(prompt_ids))
        namespace = self._namespace_or_raise()
        salt, root = self._sharing(caller.principal, cache_salt, namespace)
        tenant = caller.principal.tenant
        pictures = [RequestImage.of(placed, salt=salt, owner=owner_tag(tenant)) for placed in images]
        hashes = await self._block_hashes(prompt_ids, root, pictures)
        stored_blocks = 0
        if sampling.prompt_logprobs is None:  # else every row is computed
            with span("lookup", caller.traceparent, blocks=len(hashes)) as lookup:
                stored_blocks = await self.lookup.stored_blocks(hashes, root=root, namespace=namespace)
                lookup.set(blocks_stored=stored_blocks)
        job = Job(
            request_id=mint_request_id(),
            model=self.model.name,
            tenant=caller.principal.tenant,
            salt=salt,
            prompt_ids=prompt_ids,
            block_hashes=hashes,
            sampling=sampling,
            fidelity=fidelity,
            priority=caller.principal.priority(priority),
            deadline=caller.deadline,
            # The last token is always computed, so it is never a hit.
            stored_tokens=min(stored_blocks * self.model.block_tokens, len(prompt_ids) - 1),
            traceparent=caller.traceparent,
            session=(caller.principal.tenant, caller.session[:SESSION_CHARS_MAX]) if caller.session else None,
            wanted_rank=caller.wanted_rank,
            images=pictures,
        )
        return [branch(job, index) for index in range(choices)]

    def run(self, job: Job, caller: Caller, relay: Relay[Burst] | None = None) -> AsyncGenerator[Progress, None]:
        """What `Dispatcher.generate` yields or relays, measured."""
        last_s: float | None = None
        state, tenant = caller.state, caller.principal.tenant

        def measure(burst: Burst) -> None:
            nonlocal last_s
            tokens = len(burst.tokens)
            now_s = self.clock.monotonic_s()
            if last_s is None:
                _count_first_token(job, burst, now_s - caller.arrived_s)
            else:
                INTER_TOKEN_SECONDS.observe((now_s - last_s) / tokens, times=tokens)
            last_s = now_s
            state.stage = Stage.GENERATING
            state.tokens += tokens
            COMPLETION_TOKENS.inc(tokens)
            self.admission.charge_tokens(tenant, tokens)

        def note_lost() -> None:
            caller.state.stage = Stage.RESUMING

        return self._dispatcher.generate(job, on_burst=measure, on_lost=note_lost, relay=relay)

    def _sharing(self, principal: Principal, cache_salt: str | None, namespace: bytes) -> tuple[bytes, BlockHash]:
        """Salt and root of the caller's sharing domain. Most requests come from a domain that has asked before. Raises
        InvalidFieldError on an overlong `cache_salt`."""
        key = (principal.tenant, principal.user, cache_salt, self._purge_epoch(principal.tenant), namespace)
        known = self._domains.get(key)
        if known is None:
            salt = sharing_salt(self._secret, principal, cache_salt, epoch=key[3])
            known = salt, chain_root(namespace, salt=salt)
            if len(self._domains) >= DOMAINS_MAX:
                self._domains.clear()
            self._domains[key] = known
        return known

    def _namespace_or_raise(self) -> bytes:
        """All usable ranks agree on it: the directory refuses the others."""
        for rank in self.table.ranks.values():
            return rank.namespace
        raise UnavailableError("no rank is there to serve this request")

    async def _block_hashes(
        self, prompt_ids: Sequence[int], root: BlockHash, images: Sequence[RequestImage]
    ) -> list[BlockHash]:
        block_tokens = self.model.block_tokens
        extras = block_extras(images, block_tokens=block_tokens)

        def derive() -> list[BlockHash]:
            return derive_block_hashes(prompt_ids, root=root, block_tokens=block_tokens, extras=extras)

        return derive() if len(prompt_ids) <= HASH_INLINE_TOKENS_MAX else await self.language.run(derive)


def branch(job: Job, index: int) -> Job:
    """Choice `index` of `n`: a request of its own, which says whose choice it is."""
    if index == 0:
        return job
    return replace(job, request_id=mint_request_id(), branch=index, branch_of=job.request_id)


def _count_first_token(job: Job, burst: Burst, seconds: float) -> None:
    FIRST_TOKEN_SECONDS.observe(seconds)
    PROMPT_TOKENS.inc(len(job.prompt_ids))
    CACHED_TOKENS.inc(burst.cached_tokens)
    PREDICTED_HIT_TOKENS.inc(job.stored_tokens)
    ACTUAL_HIT_TOKENS.inc(burst.cached_tokens)
