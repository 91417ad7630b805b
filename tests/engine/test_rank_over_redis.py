"""Ranks over a real store: prefill here, decode there; and the store dying at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engine_world import GREEDY, SEEDED, oracle, tiny_model
from tests.engine.started_rank import AHEAD, StartedRank, tokens_of
from tests.kvstore.redis_server import RedisServer, redis_binaries
from tests.kvstore.test_store_faults import until
from whalepod.core.block_keys import block_key
from whalepod.core.ids import mint_incarnation
from whalepod.engine.interface import EngineRequest, FinishReason, Handoff, HandoffEvent, Work
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.store_keys import block_store_key
from whalepod.model.tensor_layout import ModelRole

OpenRank = Callable[..., StartedRank]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(next(iter(redis_binaries().values())), tmp_path).start()
    yield server
    server.kill()


@pytest.fixture
def open_rank(redis: RedisServer) -> Iterator[OpenRank]:
    opened: list[tuple[StartedRank, KvClient]] = []

    def start(role: ModelRole = ModelRole.FULL, *, touch_interval_s: float = 600.0, **kinds: Any) -> StartedRank:
        model = tiny_model(role)
        client = KvClient(
            StoreSettings(addresses=(redis.address,), touch_interval_s=touch_interval_s),
            namespace=model.namespace,
            layout=model.block_layout,
            incarnation=mint_incarnation(),
        )
        opened.append((StartedRank(store=client, role=role, **kinds), client))
        return opened[-1][0]

    yield start
    for rank, client in opened:
        rank.stop()
        client.close()


def _prefilled(rank: StartedRank, request: EngineRequest) -> Handoff:
    rank.end(request)
    (handoff,) = [event.handoff for event in rank.events(request) if isinstance(event, HandoffEvent)]
    return handoff


@pytest.mark.parametrize("role", ModelRole)
def test_a_handoff_through_redis_changes_nothing(role: ModelRole, redis: RedisServer, open_rank: OpenRank) -> None:
    before, after = open_rank(role), open_rank()
    handoff = _prefilled(before, before.submit(61, SEEDED, work=Work.PREFILL, name="x"))
    assert handoff.stored
    request = after.submit(61, SEEDED, await_handoff=True, name="x")
    after.rank.hand_off(request.request_id, 1, handoff)
    assert after.end(request).replayed_tokens == 0
    assert tokens_of(after.events(request)) == oracle(61, SEEDED)
    # The reader has unlinked the hand-off; blocks and turn snapshots stay.
    warm = after.submit(92, SEEDED, name="y")
    end = after.end(warm)
    assert (end.cached_tokens, end.replayed_tokens) == (48, 0)
    assert tokens_of(after.events(warm)) == oracle(92, SEEDED)
    assert not [key for key in redis.call("KEYS", "*") if key.startswith(b"h:")]


@pytest.mark.parametrize("work", [Work.PREFILL, Work.GENERATE])
def test_a_prefix_that_is_only_ever_used_from_the_device_lives_on_in_redis(
    work: Work, redis: RedisServer, open_rank: OpenRank
) -> None:
    rank = open_rank(touch_interval_s=0.0)
    request = rank.submit(45, name="x")
    assert request.chain_root is not None
    first = block_store_key(block_key(request.block_hashes, 0, root=request.chain_root))
    rank.end(request)
    assert until(lambda: redis.call("PEXPIRE", first, 500_000) == 1, within_s=4)
    assert rank.end(rank.submit(45, name="y", work=work)).cached_tokens == 16
    assert until(lambda: redis.call("PTTL", first) > 80_000_000, within_s=4)


def test_a_request_goes_on_from_its_crash_snapshot_in_redis_which_is_gone_after_its_end(
    redis: RedisServer, open_rank: OpenRank
) -> None:
    """After 16 tokens of output comes the border at 80."""
    long, options = replace(SEEDED, max_tokens=24), replace(AHEAD, crash_tokens=16)

    def crashes() -> list[bytes]:
        return [key for key in redis.call("KEYS", "*") if key.startswith(b"c:")]

    before, after = open_rank(options=options), open_rank(options=options)
    lost = before.submit(61, replace(long, max_tokens=100), name="x")
    before.wait(lambda: len(tokens_of(before.events(lost))) >= 22)
    before.rank.stop()  # which ends nothing well: its requests are lost
    said = [token.id for token in tokens_of(before.events(lost))][:22]
    left = len(crashes())
    assert left > 0
    request = after.submit(61, long, name="x", attempt=2, resumed=said)
    assert after.end(request).cached_tokens == 80
    assert tokens_of(after.events(request)) == oracle(61, long)[22:]
    assert until(lambda: len(crashes()) < left, within_s=4)


@pytest.mark.slow
def test_a_handoff_that_nobody_reads_leaves_redis_with_its_requests_time_and_no_other_process_helps(
    redis: RedisServer, open_rank: OpenRank
) -> None:
    rank = open_rank()
    assert _prefilled(rank, rank.submit(45, work=Work.PREFILL, name="x", timeout_s=2.0)).stored

    def handoffs() -> list[bytes]:
        return [key for key in redis.call("KEYS", "*") if key.startswith(b"h:")]

    assert len(handoffs()) == 1
    assert until(lambda: not handoffs(), within_s=4)
    assert redis.call("DBSIZE") > 0, "blocks stay"


def test_a_store_that_dies_costs_time_only_and_hits_return_with_it(redis: RedisServer, open_rank: OpenRank) -> None:
    rank = open_rank()
    long = rank.submit(29, replace(GREEDY, max_tokens=12))
    rank.wait(lambda: rank.events(long))
    redis.kill()
    assert rank.end(long).reason is FinishReason.LENGTH
    handoff = _prefilled(rank, rank.submit(45, work=Work.PREFILL))
    assert not handoff.stored
    cold = rank.submit(60, name="cold", salt=b"another")
    assert rank.end(cold).reason is FinishReason.LENGTH
    assert tokens_of(rank.events(cold)) == oracle(60)
    redis.start()

    def stored() -> bool:
        return _prefilled(rank, rank.submit(45, work=Work.PREFILL)).stored

    assert any(stored() for _ in range(50))
    other = open_rank()
    assert other.end(other.submit(45)).cached_tokens == 16
