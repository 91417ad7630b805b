"""Ranks that divide prompts find each other with real servers and exchange rows through real gloo, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from tests.cluster.conftest import free_port
from tests.cluster.test_group_membership import OPTIONS, SECRET, until
from tests.engine.context_parallel.context_world import keep_writing
from tests.engine.engine_world import OPTIONS as ENGINE_OPTIONS
from tests.engine.engine_world import World, oracle, prefill, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.cluster.group_membership import GroupMembership
from whalepod.cluster.group_peers import GroupPeers
from whalepod.cluster.group_servicer import GroupServicer
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation
from whalepod.engine.context_parallel.loop import HEAD, ContextLoop, ContextShare

WHOLE = replace(ENGINE_OPTIONS, chunk_tokens=512)


class Rank:
    """One rank of a group: an engine, and everything that keeps it in."""

    def __init__(
        self, index: int, addresses: list[str], incarnation: int = 1, *, store: MemoryStore | None = None
    ) -> None:
        self.failures: list[BaseException] = []
        self.membership = GroupMembership(
            GroupPeers(addresses, index=index, secret=SECRET, clock=SYSTEM_CLOCK),
            incarnation=Incarnation(incarnation),
            host="127.0.0.1",
            options=OPTIONS,
        )
        self.loop = ContextLoop(self.membership, is_head=index == HEAD, on_failure=self.failures.append)
        self.world = World(store=store, options=WHOLE, model=replace(tiny_model(), context=ContextShare(self.loop, 8)))
        self.server = grpc.aio.server()
        GroupServicer(self.membership, secret=SECRET, clock=SYSTEM_CLOCK).register(self.server)
        self._address = addresses[index]

    async def start(self) -> None:
        self.server.add_insecure_port(self._address)
        await self.server.start()
        self.membership.attach(self.loop)
        self.loop.start()

    async def leave(self) -> None:
        """As a rank that drains: its server still answers."""
        await self.membership.stop()
        await asyncio.to_thread(self.loop.stop)

    async def stop(self) -> None:
        await self.leave()
        await self.server.stop(None)
        assert not self.failures

    async def says_what_one_rank_says(self, tokens: int) -> None:
        heard = await asyncio.to_thread(self.world.generate, prompt_of(tokens))
        assert tuple(heard.tokens) == oracle(tokens)


@asynccontextmanager
async def group(size: int, stores: Sequence[MemoryStore] = ()) -> AsyncGenerator[tuple[list[Rank], list[str]]]:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    ranks = [Rank(index, addresses, store=stores[index] if stores else None) for index in range(size)]
    try:
        for rank in ranks:
            await rank.start()
        await until(lambda: all(rank.loop.ready.is_set() for rank in ranks))
        yield ranks, addresses
    finally:
        await asyncio.gather(*(rank.stop() for rank in ranks))


def divided(rank: Rank) -> int:
    return rank.loop.state.rows_divided


async def test_a_head_wakes_its_group_for_a_prompt_and_goes_on_alone_until_a_lost_rank_is_back() -> None:
    async with group(3) as (ranks, addresses):
        head = ranks[0]
        await head.says_what_one_rank_says(90)
        assert divided(head) > 45
        lost = ranks.pop(2)
        await lost.leave()
        await head.says_what_one_rank_says(91)
        await until(lambda: head.loop.state.members == (0, 1))
        await lost.stop()
        before = divided(head)
        await head.says_what_one_rank_says(92)
        assert divided(head) > before
        ranks.append(Rank(2, addresses, incarnation=2))
        await ranks[-1].start()
        await until(lambda: head.loop.state.members == (0, 1, 2))
        await head.says_what_one_rank_says(93)


async def test_ranks_store_their_own_blocks_and_tell_their_head() -> None:
    shared = MemoryStore()
    stores = [shared, MemoryStore(shared.blocks, shared.snapshots)]
    async with group(2, stores) as (ranks, _):
        transfers = ranks[1].world.engine.transfers
        assert transfers is not None
        writer = threading.Thread(target=keep_writing, args=(transfers,))
        writer.start()
        handoff = await asyncio.to_thread(prefill, ranks[0].world, prompt_of(130))
        transfers.close()
        writer.join()
        assert handoff.stored
        assert handoff.blocks_stored == len(shared.blocks) == 130 // tiny_model().block_tokens
        assert ranks[0].loop.state.blocks_entrusted > 0
        assert [any(call.startswith("put ") for call in store.calls) for store in stores] == [True, True]


@pytest.mark.parametrize("busy", [False, True])
async def test_ranks_without_their_head_wait_for_it(busy: bool) -> None:
    async with group(2) as (ranks, addresses):
        if busy:
            await ranks[0].says_what_one_rank_says(60)
        lost = ranks.pop(0)
        await lost.leave()
        await until(lambda: ranks[0].loop.state.members == (1,))
        await lost.stop()
        ranks.append(Rank(0, addresses, incarnation=2))
        await ranks[-1].start()
        await until(lambda: ranks[-1].loop.state.members == (0, 1))
        await ranks[-1].says_what_one_rank_says(61)
        assert divided(ranks[-1]) > 0
