"""Who chooses ranks: the router's own code under each policy, and a cost function in the manner of NVIDIA Dynamo's.

The latter is written from its public formula: of all workers, the one with the least

    overlap_weight · (blocks of the prompt not in its own cache + blocks of prompts queued there) + active blocks

where a worker's own cache is what it has computed or restored. A prefill worker is chosen by all of it, a decode worker
by its active blocks. Every prompt goes to a prefill worker, and nobody waits for another's prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Protocol

from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Clock, Deadline
from whalepod.core.ids import Incarnation, RankId, RequestId
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import SamplingParams
from whalepod.services.router.attempt import Legs
from whalepod.services.router.cost_meter import CostMeter
from whalepod.services.router.job import Job
from whalepod.services.router.placement import PlacementRules, Policy
from whalepod.services.router.placer import Patience, Placer
from whalepod.services.router.rank_table import RankTable
from whalepod.services.router.shared_prefixes import SharedPrefixes

from .timed_ranks import BLOCK_TOKENS, DecodeRank, PrefillRank, Store

SAMPLING = SamplingParams(max_tokens=1)


class Placed(Protocol):
    """Where one request runs, and what is told about it on the way."""

    decode: str
    prefill: str | None

    def ready(self) -> None: ...

    def first_token(self) -> None: ...

    def end(self) -> None: ...


class Contender(Protocol):
    async def place(self, number: int, chain: Sequence[BlockHash], tokens: int, output_tokens: int) -> Placed: ...


@dataclass(slots=True)
class Ranks:
    """The pools, by name."""

    store: Store
    prefill: Mapping[str, PrefillRank]
    decode: Mapping[str, DecodeRank]


class Directory:
    def __init__(self, ranks: Ranks) -> None:
        named = [(name, RankRole.PREFILL_FULL) for name in ranks.prefill]
        named += [(name, RankRole.DECODE) for name in ranks.decode]
        loads = {**ranks.prefill, **ranks.decode}
        self._ranks = {
            RankId(name): RankInfo(
                rank_id=RankId(name),
                role=role,
                pool=role.value,
                address="",
                incarnation=Incarnation(1),
                model="m",
                namespace=b"n" * 16,
                layout="",
                context_tokens_max=1 << 21,
                load=loads[name].load,
            )
            for name, role in named
        }

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        return MappingProxyType(self._ranks)

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        raise AssertionError(f"nobody is lost here, but {rank_id} of {incarnation}")


class Router:
    """The router's own placement. Loads reach it with replies only, as in life."""

    def __init__(self, ranks: Ranks, policy: Policy, *, clock: Clock, seed: int) -> None:
        self._ranks = ranks
        self._clock = clock
        meter = CostMeter()
        self.table = RankTable(Directory(ranks), meter=meter, clock=clock)
        self._shared = SharedPrefixes(
            block_tokens=BLOCK_TOKENS,
            tokens_min=BLOCK_TOKENS,
            meter=meter,
            stored_blocks=self._stored_blocks,
            clock=clock,
        )
        self.placer = Placer(
            self.table,
            self._shared,
            usable=lambda _: True,
            rules=PlacementRules(policy, remote_prefill_tokens_min=BLOCK_TOKENS),
            patience=Patience(),
            retry_max=2,
            meter=meter,
            rng=Random(seed),
            clock=clock,
        )

    async def place(self, number: int, chain: Sequence[BlockHash], tokens: int, output_tokens: int) -> RoutedRequest:
        del output_tokens  # nobody knows it
        job = Job(
            request_id=RequestId(number.to_bytes(16, "big")),
            model="m",
            tenant="t",
            salt=b"",
            prompt_ids=range(tokens),
            block_hashes=chain,
            sampling=SAMPLING,
            fidelity=Fidelity.FAST,
            deadline=Deadline.after(1e6, self._clock),
        )
        job = await self._shared.looked_up(job)
        self.placer.begin(job)
        _, legs = await self.placer.place(job, 1, ())
        return RoutedRequest(self, job, legs)

    def note_load(self, rank: RankInfo) -> None:
        ranks = self._ranks.decode if rank.role is RankRole.DECODE else self._ranks.prefill
        self.table.note_load(rank, ranks[rank.rank_id].load)

    async def _stored_blocks(self, job: Job) -> int:
        return self._ranks.store.leading(job.block_hashes)


class RoutedRequest:
    def __init__(self, router: Router, job: Job, legs: Legs) -> None:
        self._router, self._job, self._legs = router, job, legs
        self.decode: str = legs.decode.rank_id
        self.prefill: str | None = legs.prefill.rank_id if legs.prefill is not None else None

    def ready(self) -> None:
        assert self._legs.prefill is not None
        assert self._legs.prefill_claim is not None
        self._legs.prefill_claim.release()
        self._legs.work.note_ready(stored=True)
        self._router.note_load(self._legs.prefill)

    def first_token(self) -> None:
        self._legs.work.note_token()
        self._legs.decode_claim.finish_prefill()
        self._router.note_load(self._legs.decode)
        self._router.placer.note_generated(self._job, self._legs.decode.rank_id)

    def end(self) -> None:
        self._legs.work.end()
        self._legs.decode_claim.release()
        self._router.note_load(self._legs.decode)
        self._router.placer.end(self._job)


@dataclass(slots=True)
class _Worker:
    cached: set[BlockHash] = field(default_factory=set)
    queued_blocks: int = 0
    active_blocks: int = 0


class CostFunction:
    """Overlap credit and load."""

    def __init__(self, ranks: Ranks, *, seed: int, overlap_weight: float = 1.0) -> None:
        self._prefill = {name: _Worker() for name in ranks.prefill}
        self._decode = {name: _Worker() for name in ranks.decode}
        self._weight = overlap_weight
        self._rng = Random(seed)

    async def place(self, number: int, chain: Sequence[BlockHash], tokens: int, output_tokens: int) -> CostedRequest:
        del number, output_tokens
        blocks = -(-tokens // BLOCK_TOKENS)
        missing = {name: blocks - _leading(chain, worker.cached) for name, worker in self._prefill.items()}

        def prefill_cost(name: str) -> float:
            worker = self._prefill[name]
            return self._weight * (missing[name] + worker.queued_blocks) + worker.active_blocks

        prefill = self._least(self._prefill, prefill_cost)
        decode = self._least(self._decode, lambda name: self._decode[name].active_blocks)
        return CostedRequest(
            prefill, decode, self._prefill[prefill], self._decode[decode], chain, blocks, missing[prefill]
        )

    def _least(self, workers: Mapping[str, _Worker], cost: _Cost) -> str:
        lowest = min(map(cost, workers))
        return self._rng.choice([name for name in workers if cost(name) == lowest])


class _Cost(Protocol):
    def __call__(self, name: str, /) -> float: ...


class CostedRequest:
    def __init__(
        self,
        prefill: str,
        decode: str,
        prefill_worker: _Worker,
        decode_worker: _Worker,
        chain: Sequence[BlockHash],
        blocks: int,
        missing: int,
    ) -> None:
        self.prefill: str | None = prefill
        self.decode = decode
        self._prefill, self._decode = prefill_worker, decode_worker
        self._blocks, self._missing = blocks, missing
        prefill_worker.cached.update(chain)
        prefill_worker.queued_blocks += missing
        decode_worker.active_blocks += blocks

    def ready(self) -> None:
        self._prefill.queued_blocks -= self._missing

    def first_token(self) -> None:
        return

    def end(self) -> None:
        self._decode.active_blocks -= self._blocks


def _leading(chain: Sequence[BlockHash], cached: set[BlockHash]) -> int:
    return next((index for index, block in enumerate(chain) if block not in cached), len(chain))
