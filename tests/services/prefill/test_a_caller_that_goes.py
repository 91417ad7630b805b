"""A caller that goes in the moment in which its answer comes: what was left for it is removed."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.engine_world import prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from tests.engine.started_rank import StartedRank
from tests.services.rank_world import SECRET, TestRouter, world_config
from whalepod.cluster.rank_process import RankContext
from whalepod.cluster.rank_server import rank_identity
from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.engine.interface import Fidelity, HandoffEvent
from whalepod.rpc.prefill.v1 import prefill_pb2
from whalepod.services.prefill.servicer import PrefillServicer


def _context(world: StartedRank) -> RankContext:
    identity = rank_identity(world_config(1), RankRole.PREFILL_FULL, 0)
    namespace = tiny_model().namespace
    return RankContext(identity, world.rank, ClusterSecret(SECRET.encode()), namespace, tuple(Fidelity), SYSTEM_CLOCK)


def _router(context: RankContext) -> TestRouter:
    """Of a rank that is not registered anywhere."""
    identity = context.identity
    return TestRouter(
        RankInfo(
            rank_id=identity.rank_id,
            role=identity.role,
            pool=identity.pool,
            address=identity.address,
            incarnation=identity.incarnation,
            model=identity.model_name,
            namespace=context.namespace,
            layout="",
            context_tokens_max=0,
            fidelities=context.fidelities,
            version="",
            time_unix_ms=0,
            load=context.engine.load(),
        )
    )


@pytest.mark.parametrize("goes", [False, True])
async def test_a7_a_handoff_of_a_call_that_is_cancelled_as_it_is_answered_is_removed(goes: bool) -> None:
    store = MemoryStore()
    world = StartedRank(store=store)
    context = _context(world)
    servicer, router = PrefillServicer(context), _router(context)
    ticket = router.ticket(prompt_of(40), prefill=context.identity.rank_id)
    call = asyncio.ensure_future(servicer._run(prefill_pb2.RunRequest(ticket=ticket)))
    deadline = Deadline.after(10)
    while not any(isinstance(event, HandoffEvent) for event in world.said) and not deadline.expired:
        await asyncio.sleep(0.005)
    assert len(store.handoffs()) == 1
    servicer.deliver(list(world.said), world.rank.load())
    if goes:
        call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() == goes
    while goes and store.handoffs() and not deadline.expired:
        await asyncio.sleep(0.005)
    assert len(store.handoffs()) == (not goes)
    assert servicer.requests_live == 0
    world.stop()
