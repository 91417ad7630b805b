"""What a router knows of its ranks: the newest of what they said, and what it gave them itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.core.clock import Deadline
from whalepod.core.ids import Incarnation, RankId
from whalepod.engine.interface import RankLoad
from whalepod.services.router.cost_meter import CostMeter
from whalepod.services.router.rank_table import LOAD_BELIEVED_S, RankTable


def rank(name: str, role: RankRole = RankRole.DECODE, **changes: object) -> RankInfo:
    info = RankInfo(
        rank_id=RankId(name),
        role=role,
        pool="p",
        address="127.0.0.1:1",
        incarnation=Incarnation(7),
        model="whale",
        namespace=b"n" * 16,
        layout="l",
        context_tokens_max=100,
        time_unix_ms=1000,
        load=RankLoad(running=1, slots_total=8),
    )
    return replace(info, **changes)


class StoppedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(1000 * self.now_s)


class Directory:
    def __init__(self, *ranks: RankInfo) -> None:
        self.table = {info.rank_id: info for info in ranks}
        self.lost: list[tuple[RankId, Incarnation]] = []

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        return self.table

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        self.lost.append((rank_id, incarnation))


def test_ranks_are_sorted_by_what_they_do_and_leaving_ones_are_left_out() -> None:
    table = RankTable(
        Directory(
            rank("decode-0"),
            rank("decode-1", draining=True),
            rank("prefill-0", RankRole.PREFILL_FULL),
            rank("prefill-1", RankRole.PREFILL_ENCODER),
            rank("vision-0", RankRole.VISION),
        )
    )
    assert [info.rank_id for info in table.decode_ranks()] == ["decode-0"]
    assert [info.rank_id for info in table.prefill_ranks()] == ["prefill-0", "prefill-1"]


def test_a_replys_load_stands_until_the_next_registration() -> None:
    info = rank("decode-0")
    directory = Directory(info)
    table = RankTable(directory)
    assert table.candidate(info).load.running == 1
    table.note_load(info, RankLoad(running=5, slots_total=8))
    assert table.candidate(info).load.running == 5
    newer = replace(info, time_unix_ms=2000, load=RankLoad(running=2, slots_total=8))
    directory.table[info.rank_id] = newer
    assert table.candidate(newer).load.running == 2


def test_a_load_that_is_not_renewed_is_believed_no_longer_and_what_is_here_still_counts() -> None:
    info, clock = rank("decode-0", load=RankLoad(running=8, waiting=9, blocks_total=4, slots_total=8)), StoppedClock()
    table = RankTable(Directory(info), clock=clock)
    claim = table.claim(info.rank_id)
    assert table.candidate(info).requests_elsewhere == 17 - 1
    clock.now_s += LOAD_BELIEVED_S + 1
    candidate = table.candidate(info)
    assert (candidate.load.running, candidate.load.waiting, candidate.load.blocks_free) == (0, 0, 4)
    assert (candidate.requests_elsewhere, candidate.requests_here, table.room()) == (0, 1, 16)
    table.note_load(info, RankLoad(running=5, slots_total=8))
    assert table.candidate(info).requests_elsewhere == 5 - 1
    claim.release()


def test_the_load_of_a_rank_before_its_restart_says_nothing_about_it() -> None:
    info = rank("decode-0")
    directory = Directory(info)
    table = RankTable(directory)
    restarted = replace(info, incarnation=Incarnation(8), load=RankLoad(slots_total=8))
    directory.table[info.rank_id] = restarted
    table.note_load(info, RankLoad(running=8, slots_total=8))
    assert table.candidate(restarted).load.running == 0


def test_claims_count_from_dispatch_to_release_and_releasing_twice_is_harmless() -> None:
    info = rank("prefill-0")
    table = RankTable(Directory(info))
    one, two = table.claim(info.rank_id, prefill_tokens=100), table.claim(info.rank_id, prefill_tokens=50)
    assert (table.candidate(info).requests_here, table.candidate(info).prefill_tokens_here) == (2, 150)
    one.finish_prefill()
    assert (table.candidate(info).requests_here, table.candidate(info).prefill_tokens_here) == (2, 50)
    for claim in (one, one, two, two):
        claim.release()
    assert (table.candidate(info).requests_here, table.candidate(info).prefill_tokens_here) == (0, 0)


def test_d4_own_dispatches_survive_a_report_that_is_older_than_they_are() -> None:
    info = rank("decode-0", load=RankLoad(slots_total=8))
    table = RankTable(Directory(info))
    for _ in range(3):
        table.claim(info.rank_id)
    table.note_load(info, RankLoad(running=0, slots_total=8))
    assert table.candidate(info).busy_share == 3 / 8


def test_a_lost_rank_is_reported_with_its_incarnation() -> None:
    directory = Directory(rank("decode-0"))
    RankTable(directory).report_lost(rank("decode-0"))
    assert directory.lost == [("decode-0", 7)]


async def test_waiting_ends_with_a_change_or_at_the_deadline() -> None:
    table = RankTable(Directory())
    waiting = asyncio.create_task(table.wait_for_change(Deadline.after(10.0)))
    await asyncio.sleep(0)
    table.wake()
    async with asyncio.timeout(1.0):
        await waiting
        await table.wait_for_change(Deadline.after(0.01))


def test_d5_what_other_routers_gave_a_rank_is_seen_in_its_replies() -> None:
    info = rank("decode-0", load=RankLoad(slots_total=8))
    table = RankTable(Directory(info))
    claims = [table.claim(info.rank_id, prefill_tokens=10) for _ in range(3)]
    table.note_load(info, RankLoad(running=7, waiting=1, prefill_tokens_queued=50, slots_total=8))
    assert table.candidate(info).requests_elsewhere == 5
    assert table.candidate(info).prefill_tokens_queued == 50
    assert table.candidate(info).busy_share == 1.0
    for claim in claims:
        claim.release()
    assert table.candidate(info).busy_share == 5 / 8


def test_what_a_rank_has_computed_since_it_began_is_no_longer_before_a_newcomer() -> None:
    clock = StoppedClock()
    meter = CostMeter()
    meter.note_remote(1.0, tokens=1000)
    info = rank("prefill-0", RankRole.PREFILL_FULL, load=RankLoad(slots_total=8))
    table = RankTable(Directory(info), meter=meter, clock=clock)

    def queued() -> int:
        return table.candidate(info).prefill_tokens_queued

    clock.now_s = 5.0
    first, second = table.claim(info.rank_id, prefill_tokens=1000), table.claim(info.rank_id, prefill_tokens=500)
    assert queued() == 1500
    clock.now_s = 5.6
    assert queued() == 900
    clock.now_s = 9.0
    assert queued() == 150, "it is late, not idle"
    first.finish_prefill()
    assert queued() == 500
    second.release()
    assert queued() == 0


def test_room_is_what_other_routers_leave_and_at_least_one_request_a_rank() -> None:
    first, second = rank("decode-0", load=RankLoad(slots_total=8)), rank("decode-1", load=RankLoad(slots_total=8))
    table = RankTable(Directory(first, second))
    assert table.room() == 32
    table.note_load(first, RankLoad(running=8, waiting=4, slots_total=8))
    assert table.room() == 16 + 4
    table.note_load(first, RankLoad(running=8, waiting=30, slots_total=8))
    assert table.room() == 16 + 1
    assert RankTable(Directory()).room() is None


def test_who_takes_work_is_as_new_as_the_directory_and_as_the_last_refusal() -> None:
    first, second = rank("decode-0"), rank("decode-1", context_tokens_max=300)
    directory = Directory(first)
    table = RankTable(directory)

    def takers() -> list[str]:
        return [info.rank_id for info in table.decode_ranks()]

    assert (takers(), table.context_tokens_max) == (["decode-0"], 100)
    directory.table = {info.rank_id: info for info in (first, second)}
    assert (takers(), table.context_tokens_max) == (["decode-0", "decode-1"], 300)
    table.note_draining(second)
    assert (takers(), table.context_tokens_max) == (["decode-0"], 100)
    table.readmit(second)
    assert (takers(), table.context_tokens_max) == (["decode-0", "decode-1"], 300)
    directory.table = {}
    assert (takers(), table.context_tokens_max) == ([], None)


def test_a_candidate_is_as_new_as_everything_it_is_made_of() -> None:
    clock, meter = StoppedClock(), CostMeter()
    info = rank("decode-0")
    directory = Directory(info)
    table = RankTable(directory, meter=meter, clock=clock)
    meter.note_local(64.0, tokens=64)  # a second for each

    def seen(now: RankInfo = info) -> tuple[int, int, int, int, float]:
        one = table.candidate(now)
        queued = one.prefill_tokens_queued
        return one.requests_here, one.requests_elsewhere, queued, one.context_tokens_max, one.decode_load

    assert seen() == (0, 1, 0, 100, 1 / 8)
    claim = table.claim(info.rank_id)
    assert seen() == (1, 1, 0, 100, 2 / 8)
    prompt = table.claim(info.rank_id, prefill_tokens=40)
    assert seen() == (2, 1, 40, 100, 3 / 8)
    clock.now_s = 10.0
    assert seen() == (2, 1, 30, 100, 3 / 8)
    prompt.finish_prefill()
    assert seen() == (2, 1, 0, 100, 3 / 8)
    table.note_load(info, RankLoad(running=6, slots_total=8, prefill_tokens_queued=5))
    assert seen() == (2, 4, 5, 100, 6 / 8)
    claim.release()
    prompt.release()
    assert seen() == (0, 4, 5, 100, 4 / 8)
    larger = replace(info, context_tokens_max=200, time_unix_ms=2000)
    directory.table = {larger.rank_id: larger}
    assert seen(larger) == (0, 1, 0, 200, 1 / 8)
    clock.now_s += LOAD_BELIEVED_S + 1
    assert seen(larger) == (0, 0, 0, 200, 0.0)
