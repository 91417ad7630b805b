"""Ranks that find each other with real servers and real gloo, all in this process: who forms a group, and with whom."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

from tests.cluster.conftest import free_port
from tests.engine.expert_parallel.group_world import WEIGHTS
from whalepod.cluster.group_membership import GroupMembership, MembershipOptions
from whalepod.cluster.group_messages import sign, verify_or_raise
from whalepod.cluster.group_metrics import collector_of
from whalepod.cluster.group_peers import GroupPeers
from whalepod.cluster.group_servicer import GroupServicer
from whalepod.cluster.process_place import ProcessPlace
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError
from whalepod.core.ids import Incarnation
from whalepod.engine.expert_parallel.expert_bank import ExpertBank
from whalepod.engine.expert_parallel.group import Job
from whalepod.engine.expert_parallel.group_loop import GroupLoop, LoopOptions
from whalepod.engine.expert_parallel.rebalancing import RebalanceOptions
from whalepod.engine.expert_parallel.seat import Seat
from whalepod.model.network import Network
from whalepod.model.projection import Weights as Tensors
from whalepod.model.routed_experts import stack_experts
from whalepod.rpc.group.v1 import group_pb2, group_pb2_grpc

STEPS = 12
SECRET = ClusterSecret(b"a secret of a test cluster")
OPTIONS = MembershipOptions(
    start_patience_s=20.0, gather_patience_s=1.0, pause_s=0.02, watch_interval_s=0.05, hung_after_s=0.5,
    heal_interval_s=0.2, exchange_timeout_s=20.0,
)  # fmt: skip


class Rank:
    """One rank of a pool, without an engine: a network whose experts it shares, and everything that keeps it in."""

    def __init__(
        self, index: int, addresses: list[str], incarnation: int, *, options: MembershipOptions = OPTIONS
    ) -> None:
        config, seat = WEIGHTS.config, Seat(index, len(addresses))
        placements = seat.placements(config)
        bank = ExpertBank(index, placements)
        Network(config, WEIGHTS.tensors, engram_tables={}, token_map=WEIGHTS.token_map, make_experts=bank.make)
        self.failures: list[BaseException] = []
        self.peers = GroupPeers(addresses, index=index, secret=SECRET, clock=SYSTEM_CLOCK)
        self.membership = GroupMembership(
            self.peers,
            incarnation=Incarnation(incarnation),
            host="127.0.0.1",
            options=options,
        )
        self.loop = GroupLoop(
            bank,
            self.membership,
            self._read,
            options=LoopOptions(
                {prefix: max(map(len, placement.ranks)) for prefix, placement in placements.items()},
                rebalancing=RebalanceOptions(interval_steps=0),
            ),
            on_failure=self.failures.append,
        )
        self.read: list[str] = []
        self.server = grpc.aio.server()
        GroupServicer(self.membership, secret=SECRET, clock=SYSTEM_CLOCK).register(self.server)
        self._address = addresses[index]

    def _read(self, wanted: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        self.read += [f"{prefix}{expert}" for prefix, experts in wanted.items() for expert in experts]
        shapes = {layer.prefix: layer.shape for layer in self.loop.bank.layers}
        return {
            prefix: stack_experts(Tensors(WEIGHTS.tensors, prefix), shapes[prefix], experts)
            for prefix, experts in wanted.items()
        }

    async def start(self) -> None:
        self.server.add_insecure_port(self._address)
        await self.server.start()
        self.membership.attach(self.loop)
        self.loop.start()

    async def stop(self) -> None:
        await self.membership.stop()
        await asyncio.to_thread(self.loop.stop)
        await self.server.stop(None)

    async def run(self, value: object = None) -> object:
        """A step of this rank, through the group."""
        return await asyncio.to_thread(self.loop.run, Job(rows=1, call=lambda: value))


@asynccontextmanager
async def pool(size: int, ports: list[int], *, options: MembershipOptions = OPTIONS) -> AsyncGenerator[list[Rank]]:
    addresses = [f"127.0.0.1:{port}" for port in ports[:size]]
    ranks = [Rank(index, addresses, 1, options=options) for index in range(size)]
    try:
        for rank in ranks:
            await rank.start()
        await until(lambda: all(rank.loop.ready.is_set() for rank in ranks))
        yield ranks
    finally:
        await asyncio.gather(*(rank.stop() for rank in ranks))
        assert not [rank.failures for rank in ranks if rank.failures]


async def until(condition: Any, *, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


def members(rank: Rank) -> tuple[int, ...]:
    return () if rank.loop.forming else rank.loop.state.members


def missing(rank: Rank, *, ranks: int) -> float:
    """As operators see it."""
    registry = CollectorRegistry()
    registry.register(collector_of(rank.loop, ranks_wanted=ranks))
    together, wanted = (registry.get_sample_value(f"whalepod_expert_group_ranks{end}") for end in ("", "_wanted"))
    assert together is not None
    assert wanted is not None
    return wanted - together


async def test_a_pool_forms_one_group_and_a_rank_that_works_wakes_the_others(ports: list[int]) -> None:
    async with pool(3, ports) as ranks:
        assert [members(rank) for rank in ranks] == [(0, 1, 2)] * 3
        await asyncio.sleep(0.1)  # all asleep
        assert await ranks[1].run("done") == "done"
        assert await asyncio.gather(ranks[0].run(0), ranks[2].run(2)) == [0, 2]


async def test_survivors_go_on_without_a_rank_and_take_over_its_experts(ports: list[int]) -> None:
    async with pool(3, ports) as ranks:
        lost = ranks.pop(1)
        await lost.stop()
        await asyncio.gather(*(rank.run() for rank in ranks))
        assert [members(rank) for rank in ranks] == [(0, 2)] * 2
        held = {expert for rank in ranks for expert in rank.loop.bank.layers[0].slots}
        assert held == set(range(WEIGHTS.config.n_routed_experts))
        assert any(rank.read for rank in ranks)
        for rank in ranks:
            layer = rank.loop.bank.layers[0]
            for slot, expert in enumerate(layer.slots):
                assert torch.equal(layer.down[slot], WEIGHTS.tensors[f"{layer.prefix}experts.{expert}.w2.weight"])


async def test_a_rank_that_comes_back_is_taken_in_between_two_steps(ports: list[int]) -> None:
    async with pool(3, ports) as ranks:
        addresses = [f"127.0.0.1:{port}" for port in ports[:3]]
        await ranks[0].stop()
        await asyncio.gather(*(rank.run() for rank in ranks[1:]))
        assert members(ranks[1]) == (1, 2)
        ranks[0] = Rank(0, addresses, 2)
        await ranks[0].start()
        await until(lambda: all(members(rank) == (0, 1, 2) for rank in ranks))
        assert await asyncio.gather(*(rank.run(rank) for rank in ranks)) == ranks


@pytest.mark.parametrize("lost", [0, 1])
async def test_a_rank_that_comes_back_is_in_the_next_group_that_forms(ports: list[int], lost: int) -> None:
    """Though who is in the group has long tried to reach it, and would not try again at once."""
    async with pool(2, ports, options=replace(OPTIONS, watch_interval_s=60.0)) as ranks:
        left = ranks[1 - lost]
        await ranks[lost].stop()
        await left.run()
        assert (members(left), left.loop.state.reforms) == ((1 - lost,), 1)
        assert missing(left, ranks=2) == 1
        for _ in range(10):
            assert await left.peers.probe(lost) is None
            await asyncio.sleep(0.07)
        ranks[lost] = Rank(lost, [f"127.0.0.1:{port}" for port in ports[:2]], 2)
        await ranks[lost].start()
        await until(lambda: members(left) == (0, 1))
        assert left.loop.state.reforms == 2
        assert missing(left, ranks=2) == 0


async def test_work_that_was_aborted_is_undone_and_done_again(ports: list[int]) -> None:
    async with pool(2, ports, options=replace(OPTIONS, watch_interval_s=60.0)) as ranks:  # the step notices first
        began, undone = threading.Event(), threading.Event()

        def call() -> str:
            if not began.is_set():
                began.set()
            return "done"

        job = Job(rows=1, call=call, undo=undone.set)
        await ranks[1].stop()
        assert await asyncio.to_thread(ranks[0].loop.run, job) == "done"
        assert began.is_set()
        assert undone.is_set()
        assert members(ranks[0]) == (0,)
        ranks.pop()


async def test_the_process_of_a_rank_that_falls_silent_before_it_is_first_watched_is_ended(
    ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would ever end it: who goes on alone watches nobody."""
    ended: list[ProcessPlace] = []
    monkeypatch.setattr(ProcessPlace, "kill", lambda place: ended.append(place) is None)
    async with pool(2, ports, options=replace(OPTIONS, watch_interval_s=0.5, hung_after_s=0.1)) as ranks:
        await ranks[1].server.stop(None)
        await until(lambda: ended)
    assert ended[0] == ProcessPlace.own()


async def test_a_stranger_can_neither_ask_nor_wake(ports: list[int]) -> None:
    async with pool(2, ports), grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        stub: Any = group_pb2_grpc.GroupServiceStub(channel)
        forged = sign(
            group_pb2.WakeRequest(epoch=1, round=5), ClusterSecret(b"another secret altogether"), SYSTEM_CLOCK
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Wake(forged)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("index", [2, -1])
async def test_who_is_no_rank_of_the_pool_may_look_on_and_not_join(ports: list[int], index: int) -> None:
    async with pool(2, ports), grpc.aio.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
        stub: Any = group_pb2_grpc.GroupServiceStub(channel)
        seen = await stub.Probe(sign(group_pb2.ProbeRequest(index=index), SECRET, SYSTEM_CLOCK))
        assert list(seen.members) == [0, 1]
        with pytest.raises(grpc.aio.AioRpcError, match=rf"rank {index} is none of a pool of 2") as refused:
            await stub.Join(sign(group_pb2.JoinRequest(index=index), SECRET, SYSTEM_CLOCK))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_signature_covers_every_field_and_the_kind_of_the_message() -> None:
    request = sign(group_pb2.WakeRequest(epoch=3, round=4), SECRET, SYSTEM_CLOCK)
    verify_or_raise(request, SECRET, SYSTEM_CLOCK)
    request.round = 5
    with pytest.raises(AuthenticationError):
        verify_or_raise(request, SECRET, SYSTEM_CLOCK)
    other = group_pb2.ProbeRequest(signature=request.signature)
    with pytest.raises(AuthenticationError):
        verify_or_raise(other, SECRET, SYSTEM_CLOCK)


async def test_ranks_that_work_on_end_up_in_the_same_rounds(ports: list[int]) -> None:
    """Each comes back for its next step a little after the last one; taking turns would cost a round for each rank."""

    def work(rank: Rank, delay_s: float) -> None:
        for _ in range(STEPS):
            rank.loop.run(Job(rows=1, call=lambda: threading.Event().wait(0.05)))
            threading.Event().wait(delay_s)

    async with pool(3, ports) as ranks:
        delays = zip(ranks, (0.01, 0.015, 0.02), strict=True)
        await asyncio.gather(*(asyncio.to_thread(work, rank, delay_s) for rank, delay_s in delays))
        assert max(rank.loop.state.dummy_passes for rank in ranks) <= STEPS // 3
