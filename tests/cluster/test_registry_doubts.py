"""Registrations that are true and out of date, by accident or because somebody has written them once more."""

from __future__ import annotations

from dataclasses import replace

import grpc

from tests.cluster.registry_world import DECODE, EXPECTED, SECRET, Probes, forge, registrar, url_of, watching
from whalepod.cluster.embedded_redis import EmbeddedRedis
from whalepod.cluster.liveness import Liveness
from whalepod.cluster.registration import RankInfo, sign_registration
from whalepod.cluster.registry import RegistryWatcher
from whalepod.cluster.static_ranks import RankServicer
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import Incarnation, RankId


async def test_recorded_registrations_that_are_written_again_keep_no_dead_rank(redis_server: EmbeddedRedis) -> None:
    """By whoever can write to Redis. The rank has been started twice and died twice."""
    now_ms = SYSTEM_CLOCK.unix_ms()
    recorded = [
        sign_registration(replace(DECODE, incarnation=Incarnation(1 + beat // 3), time_unix_ms=now_ms + beat), SECRET)
        for beat in range(6)
    ]
    probes = Probes()
    async with watching(redis_server, probes) as watcher:
        for said in recorded:
            await forge(redis_server, "decode-0", said)
            await watcher.poll()
            assert DECODE.rank_id in watcher.ranks
        for said in [*recorded, *recorded]:
            await forge(redis_server, "decode-0", said)
            await watcher.poll()
            watcher.report_lost(DECODE.rank_id, Incarnation(2))
            await watcher.poll()
            assert watcher.ranks == {}


async def test_a_recorded_registration_over_a_living_ranks_changes_nothing(redis_server: EmbeddedRedis) -> None:
    before = replace(DECODE, address="127.0.0.1:8299", time_unix_ms=SYSTEM_CLOCK.unix_ms() - 1000)
    rank = registrar(redis_server, replace(DECODE, incarnation=Incarnation(2)))
    probes = Probes()
    probes.answers[DECODE.address] = Liveness.SERVING
    async with watching(redis_server, probes) as watcher:
        await rank.announce()
        await watcher.poll()
        await forge(redis_server, "decode-0", sign_registration(before, SECRET))
        await watcher.poll()
        seen = watcher.ranks[DECODE.rank_id]
        assert (seen.address, seen.incarnation) == (DECODE.address, 2)
    await rank.stop()


async def test_a_rank_whose_machines_clock_is_behind_is_used_once_it_has_answered(redis_server: EmbeddedRedis) -> None:
    moved = replace(DECODE, address="127.0.0.1:8299", incarnation=Incarnation(2))
    moved = replace(moved, time_unix_ms=SYSTEM_CLOCK.unix_ms() - 3000)
    rank = registrar(redis_server, DECODE)
    probes = Probes()
    probes.answers[moved.address] = Liveness.SERVING
    async with watching(redis_server, probes) as watcher:
        await rank.announce()
        await watcher.poll()
        await forge(redis_server, "decode-0", sign_registration(moved, SECRET))
        await watcher.poll()
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].incarnation == 2
    await rank.stop()


async def test_a_rank_that_was_started_again_while_redis_is_gone_is_known_by_its_answer(
    redis_server: EmbeddedRedis,
) -> None:
    rank = registrar(redis_server, DECODE)
    await rank.start()
    probes = Probes()
    async with watching(redis_server, probes) as watcher:
        await watcher.poll()
        redis_server.stop()
        probes.answers[DECODE.address] = replace(DECODE, incarnation=Incarnation(2))
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].incarnation == 2
        probes.answers[DECODE.address] = replace(DECODE, namespace=b"m" * 16)
        await watcher.poll()
        assert watcher.ranks == {}
    await rank.stop()


class _Answering:
    """A rank's server, which says of itself what it is told to."""

    def __init__(self) -> None:
        self.says = DECODE
        self._server = grpc.aio.server()
        RankServicer(self._now, secret=SECRET).register(self._server)

    def _now(self) -> RankInfo:
        return replace(self.says, time_unix_ms=SYSTEM_CLOCK.unix_ms())

    async def __aenter__(self) -> tuple[_Answering, str]:
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self, f"127.0.0.1:{port}"

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


async def test_a_dead_rank_is_not_taken_for_the_one_that_got_its_address(redis_server: EmbeddedRedis) -> None:
    """As pods do: its registration lies there, and whoever listens now is well."""
    watcher = RegistryWatcher(redis_url=url_of(redis_server), secret=SECRET, expected=EXPECTED, silence_s=0.0)
    async with _Answering() as (server, address):
        died = replace(DECODE, address=address, time_unix_ms=SYSTEM_CLOCK.unix_ms())
        await forge(redis_server, "decode-0", sign_registration(died, SECRET))
        server.says = replace(died, incarnation=Incarnation(7))
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].incarnation == 7
        server.says = replace(died, draining=True)
        await watcher.poll()
        assert watcher.ranks[DECODE.rank_id].draining
        server.says = replace(died, rank_id=RankId("decode-5"))
        await watcher.poll()
        assert watcher.ranks == {}
    await watcher.stop()
