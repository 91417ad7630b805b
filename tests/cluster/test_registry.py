"""Routers learn ranks from signed registrations, and keep what they know when Redis is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from random import Random

import pytest
import redis.asyncio as aioredis

from tests.cluster.registry_world import DECODE, EXPECTED, PREFILL, SECRET, Probes, forge, registrar, url_of, watching
from whalepod.cluster.embedded_redis import EmbeddedRedis
from whalepod.cluster.liveness import Liveness
from whalepod.cluster.registration import sign_registration
from whalepod.cluster.registration_store import INDEX_KEY, registration_key
from whalepod.cluster.registry import SILENT_POLLS_MAX, RegistryWatcher
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ConfigError
from whalepod.core.ids import Incarnation, RankId
from whalepod.engine.interface import RankLoad


async def test_a_registered_rank_is_seen_with_what_it_said(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        seen = watcher.ranks[DECODE.rank_id]
        assert replace(seen, time_unix_ms=0) == DECODE
        assert watcher.redis_ok
    await rank.stop()


async def test_a_rank_that_speaks_otherwise_is_refused_and_nobody_is_asked(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, replace(DECODE, speaks_tls=True))
    await rank.start()
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        assert watcher.ranks == {}
        assert "speaks TLS" in watcher.refused[DECODE.rank_id]
    await rank.stop()


async def test_a_rank_that_leaves_is_gone_at_the_next_poll(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        await rank.stop()
        await watcher.poll()
        assert watcher.ranks == {}


async def test_a_registration_that_is_not_renewed_is_believed_no_longer(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE, heartbeat_s=1000)
    await rank.start()
    async with watching(redis_server, Probes(), silence_s=0.1) as watcher:
        await watcher.poll()
        assert watcher.ranks
        async with asyncio.timeout(5):
            while watcher.ranks:
                await watcher.poll()
    await rank.stop()


async def test_a_registration_cannot_be_evicted_before_blocks(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    async with aioredis.Redis.from_url(url_of(redis_server)) as client:
        assert await client.ttl(registration_key(DECODE.rank_id)) == -1
        assert await client.ttl(INDEX_KEY) == -1
    await rank.stop()


async def test_a_silent_rank_that_serves_is_used_all_the_same(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE, heartbeat_s=1000)
    await rank.start()
    probes = Probes()
    probes.answers[DECODE.address] = Liveness.SERVING
    async with watching(redis_server, probes, silence_s=0.0) as watcher:
        for _ in range(3):
            await watcher.poll()
            assert DECODE.rank_id in watcher.ranks
    await rank.stop()


async def test_what_a_rank_left_long_ago_is_not_believed_and_goes_when_another_joins(
    redis_server: EmbeddedRedis,
) -> None:
    long_ago = SYSTEM_CLOCK.unix_ms() - 120_000
    await forge(redis_server, "decode-0", sign_registration(replace(DECODE, time_unix_ms=long_ago), SECRET))
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        assert watcher.ranks == {}
    stranger = registrar(redis_server, replace(PREFILL, namespace=b"m" * 16, layout="B=256"))
    await stranger.start()  # nobody else is alive to disagree
    async with aioredis.Redis.from_url(url_of(redis_server)) as client:
        assert not await client.exists(registration_key("decode-0"))
    await stranger.stop()


async def test_heartbeats_keep_a_registration_alive(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE, heartbeat_s=0.02)
    await rank.start()
    async with watching(redis_server, Probes(), silence_s=0.3) as watcher:
        for _ in range(20):
            await watcher.poll()
            assert DECODE.rank_id in watcher.ranks
            await asyncio.sleep(0.04)
    await rank.stop()


@pytest.mark.parametrize("key", [registration_key(DECODE.rank_id), INDEX_KEY], ids=["registration", "index"])
async def test_what_is_no_registration_does_not_keep_a_rank_out(redis_server: EmbeddedRedis, key: bytes) -> None:
    rank = registrar(redis_server, DECODE, heartbeat_s=1000)
    await rank.start()
    async with aioredis.Redis.from_url(url_of(redis_server)) as client:
        await client.delete(key)
        await client.hset(key.decode(), "of another type", "x")  # type: ignore[misc]
    assert await rank.announce()
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        assert DECODE.rank_id in watcher.ranks
    await rank.stop()


async def test_a_restarted_rank_is_followed_to_its_new_port(redis_server: EmbeddedRedis) -> None:
    first = registrar(redis_server, DECODE)
    await first.start()
    moved = replace(DECODE, address="127.0.0.1:9999", incarnation=Incarnation(2))
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        second = registrar(redis_server, moved)
        await second.announce()
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].address == "127.0.0.1:9999"
        await first.stop()  # late, and no longer its name
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].address == "127.0.0.1:9999"
        await second.stop()


async def test_a_forged_registration_is_refused_and_reported(redis_server: EmbeddedRedis) -> None:
    rank = replace(DECODE, time_unix_ms=SYSTEM_CLOCK.unix_ms())
    await forge(redis_server, "decode-0", sign_registration(rank, ClusterSecret(b"x" * 16)))
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        assert watcher.ranks == {}
        assert "not signed" in watcher.refused["decode-0"]


async def test_a_true_registration_under_another_name_is_refused(redis_server: EmbeddedRedis) -> None:
    rank = replace(DECODE, time_unix_ms=SYSTEM_CLOCK.unix_ms())
    await forge(redis_server, "decode-7", sign_registration(rank, SECRET))
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        assert watcher.ranks == {}
        assert "decode-0" in watcher.refused["decode-7"]


async def test_f26_a_router_refuses_a_rank_with_another_layout_and_names_both(redis_server: EmbeddedRedis) -> None:
    stranger = replace(PREFILL, namespace=b"m" * 16, layout="B=256", time_unix_ms=SYSTEM_CLOCK.unix_ms())
    await forge(redis_server, "prefill-0", sign_registration(stranger, SECRET))
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        assert watcher.ranks == {}
        assert "B=256" in watcher.refused["prefill-0"]
        assert "B=64" in watcher.refused["prefill-0"]


async def test_f26_a_rank_with_another_layout_does_not_join(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    stranger = registrar(redis_server, replace(PREFILL, namespace=b"m" * 16, layout="B=256"))
    with pytest.raises(ConfigError) as refusal:
        await stranger.start()
    assert "B=256" in str(refusal.value)
    assert "B=64" in str(refusal.value)
    await rank.stop()


async def test_a_rank_may_come_back_with_another_layout_under_its_own_name(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    again = registrar(redis_server, replace(DECODE, namespace=b"m" * 16, layout="B=256", incarnation=Incarnation(2)))
    await again.start()
    await again.stop()
    await rank.stop()


async def test_the_table_survives_redis_as_long_as_ranks_answer(redis_server: EmbeddedRedis) -> None:
    ranks = [registrar(redis_server, info) for info in (DECODE, PREFILL)]
    for rank in ranks:
        await rank.start()
    probes = Probes()
    async with watching(redis_server, probes) as watcher:
        await watcher.poll()
        redis_server.stop()
        probes.answers[DECODE.address] = Liveness.SERVING
        await watcher.poll()
        assert not watcher.redis_ok
        assert set(watcher.ranks) == {DECODE.rank_id}
        probes.answers[PREFILL.address] = Liveness.SERVING
        await watcher.poll()
        assert set(watcher.ranks) == {DECODE.rank_id, PREFILL.rank_id}
    for rank in ranks:
        await rank.stop()


async def test_a_killed_redis_comes_back_and_ranks_are_registered_again(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE, heartbeat_s=0.05)
    await rank.start()
    probes = Probes()
    probes.answers[DECODE.address] = Liveness.SERVING
    async with watching(redis_server, probes) as watcher:
        await watcher.poll()
        assert redis_server.pid is not None
        os.kill(redis_server.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            await watcher.poll()
            assert DECODE.rank_id in watcher.ranks
            probes.answers.clear()  # from here on only a registration keeps the rank
            while not (watcher.redis_ok and DECODE.rank_id in watcher.ranks):
                await asyncio.sleep(0.05)
                await watcher.poll()
    await rank.stop()


async def test_a_slow_answer_alone_does_not_remove_a_rank_at_once_but_a_dead_one_goes(
    redis_server: EmbeddedRedis,
) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    probes = Probes()
    async with watching(redis_server, probes) as watcher:
        await watcher.poll()
        redis_server.stop()
        probes.answers[DECODE.address] = Liveness.SILENT
        await watcher.poll()
        assert DECODE.rank_id in watcher.ranks
        for _ in range(5):
            await watcher.poll()
        assert watcher.ranks == {}
        probes.answers[DECODE.address] = Liveness.SERVING
        await watcher.poll()
        assert DECODE.rank_id in watcher.ranks
    await rank.stop()


async def test_a_rank_that_stands_still_stays_away_though_its_registration_lies_there(
    redis_server: EmbeddedRedis,
) -> None:
    rank = registrar(redis_server, DECODE, heartbeat_s=1000)
    await rank.start()
    probes = Probes()
    probes.answers[DECODE.address] = Liveness.SERVING
    async with watching(redis_server, probes, silence_s=0.0) as watcher:
        await watcher.poll()
        probes.answers[DECODE.address] = Liveness.SILENT
        seen: list[bool] = []
        for _ in range(12):
            await watcher.poll()
            seen.append(DECODE.rank_id in watcher.ranks)
        assert seen == [True] * (SILENT_POLLS_MAX - 1) + [False] * (13 - SILENT_POLLS_MAX)
    await rank.stop()


async def test_a_rank_whose_link_broke_is_unusable_until_it_answers(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    probes = Probes()
    async with watching(redis_server, probes) as watcher:
        await watcher.poll()
        watcher.report_lost(DECODE.rank_id, DECODE.incarnation)
        assert watcher.ranks == {}
        await watcher.poll()
        assert watcher.ranks == {}
        probes.answers[DECODE.address] = Liveness.SERVING
        await watcher.poll()
        assert DECODE.rank_id in watcher.ranks
    await rank.stop()


async def test_a_new_incarnation_of_a_lost_rank_is_usable_at_once(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    async with watching(redis_server, Probes()) as watcher:
        await watcher.poll()
        watcher.report_lost(DECODE.rank_id, DECODE.incarnation)
        again = registrar(redis_server, replace(DECODE, incarnation=Incarnation(2)))
        await again.announce()
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].incarnation == 2
        await again.stop()
    await rank.stop()


async def test_changes_are_reported_and_load_alone_is_not_one(redis_server: EmbeddedRedis) -> None:
    seen: list[set[str]] = []
    watcher = RegistryWatcher(
        redis_url=url_of(redis_server),
        secret=SECRET,
        expected=EXPECTED,
        probe=Probes(),
        on_change=lambda ranks: seen.append(set(ranks)),
    )
    rank = registrar(redis_server, DECODE)
    await rank.start()
    await watcher.poll()
    await rank.announce()
    await watcher.poll()
    await rank.stop()
    await watcher.poll()
    assert seen == [{"decode-0"}, set()]
    await watcher.stop()


async def test_names_of_ranks_long_gone_are_forgotten_when_one_joins(redis_server: EmbeddedRedis) -> None:
    rank = registrar(redis_server, DECODE)
    async with aioredis.Redis.from_url(url_of(redis_server)) as client:
        await client.sadd(INDEX_KEY, "gone-7")  # type: ignore[misc]
        await rank.start()
        assert await client.smembers(INDEX_KEY) == {b"decode-0"}  # type: ignore[misc]
    await rank.stop()


async def test_ranks_and_routers_start_without_redis(redis_server: EmbeddedRedis) -> None:
    redis_server.stop()
    rank = registrar(redis_server, DECODE)
    await rank.start()
    async with watching(redis_server, Probes()) as watcher:
        await watcher.start()
        assert watcher.ranks == {}
        assert not watcher.redis_ok
    await rank.stop()


@pytest.mark.parametrize("seed", range(3))
async def test_d9_registrations_lost_repeated_and_late_lead_to_the_truth_within_a_poll_of_the_last(
    redis_server: EmbeddedRedis, seed: int
) -> None:
    """What there are of events is registrations: each says everything, so none is missed for good, and a restarted rank
    begins a new incarnation."""
    rng, truth = Random(seed), DECODE
    late: list[bytes] = []
    async with watching(redis_server, Probes()) as watcher:
        for number in range(60):
            truth = replace(truth, time_unix_ms=SYSTEM_CLOCK.unix_ms(), load=RankLoad(running=number, slots_total=8))
            if rng.random() < 0.1:  # restarted, with a count that begins anew
                truth = replace(truth, incarnation=Incarnation(truth.incarnation + 1), load=RankLoad(slots_total=8))
            said = sign_registration(truth, SECRET)
            late.append(said)
            if rng.random() < 0.8:
                await forge(redis_server, "decode-0", said)
            if rng.random() < 0.2:
                await forge(redis_server, "decode-0", rng.choice(late))
            if rng.random() < 0.5:
                await watcher.poll()
        await forge(redis_server, "decode-0", sign_registration(truth, SECRET))
        await watcher.poll()
        assert watcher.ranks[RankId("decode-0")] == truth
        assert not watcher.refused
