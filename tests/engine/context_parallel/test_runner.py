"""An engine that heads a group: blocks, hand-offs and tokens of one rank, to the bit, whatever the group does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.engine.context_parallel.context_world import ContextWorld
from tests.engine.engine_world import OPTIONS, World, decode, oracle, prefill, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.engine.expert_parallel.transport import GroupBrokenError, Transport
from whalepod.engine.interface import Work
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.context_parallel import RowExchange
from whalepod.model.forward_pass import ForwardPass
from whalepod.model.network import Network
from whalepod.model.tensor_layout import ModelRole

WHOLE = replace(OPTIONS, chunk_tokens=512)
BLOCK_TOKENS = tiny_model().block_tokens


def served(world: World, store: MemoryStore, tokens: int, *, name: str = "x", role: ModelRole = ModelRole.FULL) -> None:
    """What the world's prefill leaves is what one rank's leaves, and a decode rank says from it what one rank says."""
    alone = MemoryStore()
    wanted = prefill(World(store=alone, options=WHOLE, role=role), prompt_of(tokens), name=name)
    handoff = prefill(world, prompt_of(tokens), name=name)
    assert handoff.stored
    assert (handoff.first_token, handoff.boundary_tokens, handoff.kind) == (
        wanted.first_token, wanted.boundary_tokens, wanted.kind
    )  # fmt: skip
    assert {key: store.blocks[key] for key in alone.blocks} == alone.blocks
    (key,) = alone.handoffs()
    assert key in store.snapshots
    assert {part: bytes(data) for part, data in store.snapshots[key].parts.items()} == {
        part: bytes(data) for part, data in alone.snapshots[key].parts.items()
    }
    heard = decode(World(store=store), prompt_of(tokens), handoff, name=name)
    assert tuple(heard.tokens) == oracle(tokens)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [15, 17, 32, 33, 63, 64, 65, 127, 130])
def test_a_prompt_leaves_the_blocks_and_says_the_tokens_of_one_rank(tokens: int, ranks: int) -> None:
    store = MemoryStore()
    world = ContextWorld(ranks, store=store, options=WHOLE)
    served(world, store, tokens)
    if ranks > 1 and tokens > 30:
        assert world.head.state.rows_divided > 0
    world.close()
    by_others = sum(blocks_put(own) for own in world.stores)
    assert by_others == world.head.state.blocks_entrusted
    if ranks > 1 and tokens == 130:
        assert by_others >= tokens // BLOCK_TOKENS // 3


def blocks_put(store: MemoryStore) -> int:
    return sum(int(call.split()[1]) for call in store.calls if call.startswith("put "))


@pytest.mark.parametrize("fault", ["no store", "refused", "untold"])
def test_the_head_stores_what_others_do_not(fault: str) -> None:
    """A hand-off is reported once the store has all of it, whoever wrote it."""
    store = MemoryStore()
    world = ContextWorld(2, store=store, options=WHOLE, store_blocks=fault != "no store")
    if fault == "refused":
        world.stores[0].takes = lambda: False
    elif fault == "untold":
        other = world.hall.loops[1]
        other.tell_head = lambda epoch, number, stored: world.head.break_group()
    served(world, store, 130)
    world.close()
    assert world.head.state.blocks_entrusted > 0


def test_a_block_that_was_told_of_in_an_earlier_group_is_not_taken_for_stored() -> None:
    world = ContextWorld(2, options=WHOLE)
    number, stored = world.head.entrust()
    world.head.was_stored(world.head.epoch - 1, number, stored=True)
    assert not stored.done()
    world.head.was_stored(world.head.epoch, number, stored=True)
    assert stored.result(0)
    _, unanswered = world.head.entrust()
    world.close()
    assert not unanswered.result(5)


def test_an_encoder_rank_divides_prompts_too() -> None:
    store = MemoryStore()
    world = ContextWorld(2, store=store, options=WHOLE, role=ModelRole.ENCODER)
    served(world, store, 100, role=ModelRole.ENCODER)
    assert world.head.state.rows_divided > 0
    world.close()


def test_state_that_was_restored_or_computed_alone_goes_to_the_others_before_they_need_it() -> None:
    """A first prompt leaves blocks, a second one shares them; single rows at its chunks' ends are computed alone."""
    store = MemoryStore()
    first = World(store=store, options=WHOLE)
    prefill(first, prompt_of(160))
    world = ContextWorld(2, store=store, options=replace(OPTIONS, chunk_tokens=40))
    served(world, store, 165)
    assert world.head.state.copied_bytes > 0
    assert world.head.state.rows_alone > 0
    assert world.head.state.rows_divided > 0
    world.close()


def test_chunks_of_several_prompts_in_one_step_are_divided_one_by_one() -> None:
    store = MemoryStore()
    world = ContextWorld(2, store=store, options=replace(OPTIONS, chunk_tokens=48))
    requests = [world.request(prompt_of(tokens, seed=tokens), work=Work.PREFILL) for tokens in (70, 90)]
    heard = [world.submit(request) for request in requests]
    world.run()
    alone = MemoryStore()
    for one, request, tokens in zip(heard, requests, (70, 90), strict=True):
        wanted = prefill(World(store=alone, options=WHOLE), prompt_of(tokens, seed=tokens))
        assert one.handoff is not None
        assert one.handoff.first_token == wanted.first_token, request.request_id
    assert {key: store.blocks[key] for key in alone.blocks} == alone.blocks
    assert world.head.state.copied_bytes == 0
    world.close()


@pytest.mark.parametrize("exchanges", [0, 1, 4, 9])
def test_a_prompt_goes_on_when_a_rank_of_the_group_is_lost_and_with_the_next_group(exchanges: int) -> None:
    store = MemoryStore()
    world = ContextWorld(3, store=store, options=replace(OPTIONS, chunk_tokens=48))
    lost = world.hall.loops[2]
    follow = lost.follow
    assert follow is not None
    lost.follow = lambda transport: follow(_Dying(transport, exchanges))
    served(world, store, 100)
    assert world.head.forming, "one rank computed the rest"
    world.form([0, 1])
    served(world, store, 180, name="y")
    assert world.head.state.reforms == 1
    assert world.head.state.members == (0, 1)
    world.close()


def test_who_asks_to_join_ends_a_group_and_short_chunks_never_need_one() -> None:
    store = MemoryStore()
    world = ContextWorld(2, store=store, options=WHOLE, rows_min=60)
    served(world, store, 60)
    assert world.head.state.rows_divided == 0
    for loop in world.hall.loops:
        loop.ask_to_reform()
    world.form([0, 1])
    served(world, store, 230, name="y")
    assert world.head.state.rows_divided > 0
    world.close()


def test_what_the_model_raises_at_the_head_breaks_the_group_and_not_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ContextWorld(2, options=WHOLE)
    network = tiny_model().network
    compute = type(network).compute_shared

    def failing(self: Network, segment: Segment, caches: Caches, exchange: RowExchange) -> ForwardPass:
        if exchange.rank == 0:
            raise RuntimeError("out of memory")
        return compute(self, segment, caches, exchange)

    monkeypatch.setattr(type(network), "compute_shared", failing)
    heard = world.generate(prompt_of(60))
    assert heard.end.error is not None
    assert tuple(world.generate(prompt_of(60)).tokens) == oracle(60)
    world.close()


class _Dying:
    """A transport whose rank goes after so many exchanges."""

    def __init__(self, inner: Transport, exchanges: int) -> None:
        self._inner = inner
        self._left = exchanges
        self.rank = inner.rank
        self.size = inner.size

    def exchange(self, sent: torch.Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> torch.Tensor:
        if not self._left:
            raise GroupBrokenError("killed")
        self._left -= 1
        return self._inner.exchange(sent, sent_bytes, received_bytes)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._inner.gather(values)

    def share_memory(self, bytes_each: int) -> None:
        """There is no device."""

    def settle(self) -> None:
        self._inner.settle()

    def close(self) -> None:
        self._inner.close()
