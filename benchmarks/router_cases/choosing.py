"""What choosing ranks for one request costs the router's event loop, by how many ranks there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.core.clock import thread_cpu_s
from whalepod.core.ids import Incarnation, RankId
from whalepod.engine.interface import Fidelity, RankLoad
from whalepod.services.router.cost_meter import CostMeter
from whalepod.services.router.placement import PlacementRequest, PlacementRules, plan_placement
from whalepod.services.router.rank_table import RankTable

CALLS, ROUNDS = 50, 20


class Pool:
    """So many decode ranks and as many prefill ranks, none of which is ever lost."""

    def __init__(self, count: int) -> None:
        roles = {"decode": RankRole.DECODE, "prefill": RankRole.PREFILL_FULL}
        infos = [_rank(RankId(f"{pool}-{index}"), role) for pool, role in roles.items() for index in range(count)]
        self.ranks: Mapping[RankId, RankInfo] = MappingProxyType({info.rank_id: info for info in infos})

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        raise AssertionError(f"nobody is lost here, but {rank_id} of {incarnation}")


def choosing_us(count: int) -> float:
    """Processor time of one thread, in the best of the rounds: room for admission, candidates, the choice, the claims
    of the request, and their end."""
    table, meter, rng = RankTable(Pool(count)), CostMeter(), Random(0)
    meter.note_remote(1.0, tokens=1000)

    def choose() -> None:
        assert table.room()
        placement = plan_placement(
            PlacementRequest(prompt_tokens=1000, stored_tokens=0, fidelity=Fidelity.FAST),
            decode=[table.candidate(rank) for rank in table.decode_ranks()],
            prefill=[table.candidate(rank) for rank in table.prefill_ranks()],
            rules=PlacementRules(),
            costs=meter.costs,
            rng=rng,
        )
        assert placement.prefill is not None
        claims = table.claim(placement.decode), table.claim(placement.prefill, prefill_tokens=1000)
        for claim in claims:
            claim.release()

    return _best_us(choose)


def _best_us(call: Callable[[], None]) -> float:
    best_s = float("inf")
    for _ in range(ROUNDS):
        before_s = thread_cpu_s()
        for _ in range(CALLS):
            call()
        best_s = min(best_s, (thread_cpu_s() - before_s) / CALLS)
    return 1e6 * best_s


def _rank(name: RankId, role: RankRole) -> RankInfo:
    return RankInfo(
        rank_id=name,
        role=role,
        pool="pool",
        address="127.0.0.1:1",
        incarnation=Incarnation(1),
        model="whale",
        namespace=b"stub ranks here!",
        layout="stub",
        context_tokens_max=1 << 20,
        load=RankLoad(slots_total=256, blocks_free=1, blocks_total=1),
    )
