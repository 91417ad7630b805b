"""What the processes of one router keep together, and what is left of a process that is killed at any point."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b

import pytest

from tests.services.router.router_under_test import until
from tests.services.router.test_rank_table import Directory, rank
from tests.services.router.test_tenant_limits import SetClock, refusal
from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.ids import Incarnation, RankId
from whalepod.services.router.hot_ranks import HotRanks
from whalepod.services.router.joint_memory import HELD_S_MAX, JointMemory, create_memory, note_ended
from whalepod.services.router.joint_parts import JointParts
from whalepod.services.router.joint_prefixes import PrefixTakenError, told_depths
from whalepod.services.router.joint_records import WAYS, KeyedRecords
from whalepod.services.router.pending_prefixes import REMEMBERED_S
from whalepod.services.router.rank_table import RankTable
from whalepod.services.router.tenant_limits import TENANTS_MAX, Limits, TenantLimits


@pytest.fixture
def file() -> Iterator[int]:
    file = create_memory()
    yield file
    os.close(file)


def attached(file: int, process: int, *, clock: Clock = SYSTEM_CLOCK, running_max: int = 4) -> JointParts:
    memory = JointMemory(file, process, processes=3, clock=clock)
    return JointParts(memory, running_max=running_max, queue_max=2)


def hashes(text: str) -> list[BlockHash]:
    """One block a letter, named by all before it."""
    return [BlockHash(blake2b(text[: index + 1].encode()).digest()[:32]) for index in range(len(text))]


def limits(parts: JointParts, clock: Clock, **limit: int) -> TenantLimits:
    return TenantLimits(Limits(**limit), tenants=parts.tenants, clock=clock)


def test_a_tenants_requests_are_counted_over_all_processes(file: int) -> None:
    clock = SetClock()
    one, two = (limits(attached(file, index, clock=clock), clock, requests_per_minute=6) for index in range(2))
    for _ in range(3):
        one.enter("a", requests=1)
        two.enter("a", requests=1)
    assert [refusal(one, "a"), refusal(two, "a")] == [10.0, 10.0]
    two.enter("b", requests=6)
    clock.now_s += 10.0
    two.enter("a", requests=1)
    assert refusal(one, "a") == 10.0


async def test_a_tenants_tokens_are_counted_over_all_processes(file: int) -> None:
    clock = SetClock()
    parts = [attached(file, index, clock=clock) for index in range(2)]
    one, two = (limits(each, clock, tokens_per_minute=600) for each in parts)
    for _ in range(9):
        one.charge_tokens("a", 100)
    two.enter("a", requests=1)  # those of the last moment are not told one by one
    parts[0].tenants.write_charges()
    assert refusal(two, "a") == 31.0
    two.charge_tokens("b", 601)
    await until(lambda: _refuses(one, "b"))


def _refuses(limits: TenantLimits, tenant: str) -> bool:
    try:
        limits.enter(tenant, requests=1)
    except Exception:  # noqa: BLE001  which one, the tests above say
        return True
    return False


def test_requests_at_a_time_of_a_process_that_has_ended_are_free_and_its_successors_begin_with_none(file: int) -> None:
    clock = SetClock()
    one, two = (limits(attached(file, index, clock=clock), clock, concurrent_max=3) for index in range(2))
    one.enter("a", requests=2)
    two.enter("a", requests=1)
    assert refusal(two, "a") == 1.0
    note_ended(file, 0)
    two.enter("a", requests=2)
    two.leave("a", requests=1)
    again = limits(attached(file, 0, clock=clock), clock, concurrent_max=3)
    again.enter("a", requests=1)
    assert refusal(again, "a") == 1.0
    again.leave("a", requests=1)
    two.enter("a", requests=1)


def test_a_tenant_that_has_requests_is_not_forgotten_for_many_that_have_none(file: int) -> None:
    clock = SetClock()
    one, two = (limits(attached(file, index, clock=clock), clock, concurrent_max=1) for index in range(2))
    one.enter("a", requests=1)
    others = _tenants_beside("a", 3 * WAYS)
    for name in others:
        clock.now_s += 1.0
        two.enter(name, requests=1)
        two.leave(name, requests=1)
    assert [refusal(one, "a"), refusal(two, "a")] == [1.0, 1.0]
    for name in others[: WAYS - 1]:
        two.enter(name, requests=1)
    two.enter(others[-1], requests=1)  # all are in use: the one that has been away longest is forgotten
    two.enter("a", requests=1)


def _tenants_beside(tenant: str, count: int) -> list[str]:
    """Names whose records lie in the set of that tenant's."""

    def set_of(name: str) -> int:
        return int.from_bytes(blake2b(name.encode(), digest_size=16).digest()[:4], "little") % (TENANTS_MAX // WAYS)

    names = (f"of many {index}" for index in itertools.count())
    return list(itertools.islice((name for name in names if set_of(name) == set_of(tenant)), count))


def test_told_prefixes_are_few_and_at_most_an_eighth_apart() -> None:
    assert told_depths(0, 5) == [1, 2, 3, 4, 5]
    assert told_depths(3, 3) == []
    assert told_depths(20, 23) == [22, 23]
    assert told_depths(0, 37)[-6:] == [26, 28, 30, 32, 36, 37]
    for blocks in (1, 15, 16, 17, 100, 7813):
        depths = told_depths(0, blocks)
        assert depths[-1] == blocks
        assert len(depths) <= 16 + 8 * max(0, blocks.bit_length() - 4) + 1
        assert all(later - one <= max(1, later // 8) for one, later in itertools.pairwise(depths))
        assert set(depths) - set(told_depths(0, 10_000)) <= {blocks}
        for stored in (1, 16, 50):
            assert told_depths(stored, blocks) == [depth for depth in depths if depth > stored]


def test_a_prefix_that_another_process_computes_is_found_until_it_is_forgotten(file: int) -> None:
    clock = SetClock()
    one, two = (attached(file, index, clock=clock).prefixes for index in range(2))
    text = "abcdefghijklmnopqrstuvwxyz"
    name = one.begin(hashes(text), stored_blocks=0, seconds=6, looked_s=None, blocks_min=1)
    for prompt, depth in {text: 26, text[:21] + "XYZ": 20, "abcX": 3, text + "0123456789": 26, "X": None}.items():
        share, _ = two.longest(hashes(prompt), stored_blocks=0)
        assert (share and share.depth_blocks) == depth, prompt
    share, _ = two.longest(hashes(text), stored_blocks=0)
    assert share is not None
    assert (share.pending.began_s, share.pending.expected_s, share.pending.stored) == (1000.0, 1006.0, None)
    clock.now_s += 5
    one.end(name, stored=True)
    clock.now_s += REMEMBERED_S
    share, _ = two.longest(hashes(text), stored_blocks=0)
    assert share is not None
    assert share.pending.stored
    clock.now_s += 0.1
    assert two.longest(hashes(text), stored_blocks=0)[0] is None


def test_who_has_looked_before_another_began_looks_again(file: int) -> None:
    clock = SetClock()
    one, two = (attached(file, index, clock=clock).prefixes for index in range(2))
    looked = two.longest(hashes("abc"), stored_blocks=0)
    assert looked == (None, 1000.0)
    clock.now_s += 0.001
    one.begin(hashes("abcd"), stored_blocks=0, seconds=6, looked_s=None, blocks_min=1)
    with pytest.raises(PrefixTakenError):
        two.begin(hashes("abc"), stored_blocks=0, seconds=6, looked_s=looked[1], blocks_min=2)
    two.begin(hashes("aXYZ"), stored_blocks=0, seconds=6, looked_s=looked[1], blocks_min=2)  # one block is too few
    clock.now_s += 0.001
    share, looked_s = two.longest(hashes("abc"), stored_blocks=0)
    assert share is not None
    two.begin(hashes("abc"), stored_blocks=0, seconds=6, looked_s=looked_s, blocks_min=2)  # it has lost its patience


async def test_who_waits_hears_of_the_end_and_of_the_death_of_whom_it_waits_for(file: int) -> None:
    one, two, three = (attached(file, index).prefixes for index in range(3))
    name = one.begin(hashes("abc"), stored_blocks=0, seconds=6, looked_s=None, blocks_min=1)
    three.begin(hashes("xyz"), stored_blocks=0, seconds=6, looked_s=None, blocks_min=1)
    ends, dies = (two.longest(hashes(text), stored_blocks=0)[0] for text in ("abc", "xyz"))
    assert ends is not None
    assert dies is not None
    for share in (ends, dies):
        two.watch(share.pending)
    one.end(name, stored=True)
    await until(ends.pending.ended.is_set)
    assert ends.pending.stored
    assert not dies.pending.ended.is_set()
    note_ended(file, 2)
    await until(dies.pending.ended.is_set)
    assert dies.pending.stored is False
    assert two.longest(hashes("xyz"), stored_blocks=0)[0] is None


def test_what_runs_and_waits_is_bounded_over_all_processes_and_the_first_in_turn_is_first(file: int) -> None:
    clock = SetClock()
    one, two, three = (attached(file, index, clock=clock).bound for index in range(3))
    assert one.try_take(3, (0, 0, 1.0))
    assert not two.try_take(2, (0, 0, 2.0))
    assert two.try_take(1, (0, 0, 2.0))
    assert [one.try_wait(1), two.try_wait(1), three.try_wait(1)] == [True, True, False]
    one.show((0, 0, 3.0), waits_for_bound=True)
    two.show((0, 0, 2.5), waits_for_bound=True)
    assert (two.running_elsewhere, three.running_elsewhere, three.waiting_weight_elsewhere(0)) == (3, 4, 2)
    assert three.waiting_weight_elsewhere(-1) == 0, "who goes before them does not wait for them"
    one.give_back(3)
    assert not one.try_take(1, (0, 0, 3.0)), "the other one came first"
    assert not three.try_take(1, (0, 1, 1.0)), "its tenant has more"
    assert three.try_take(1, (-1, 5, 9.0)), "it has a better priority"
    assert two.try_take(1, (0, 0, 2.5))
    two.waits_no_more(1)
    two.show(None, waits_for_bound=False)
    assert one.try_take(1, (0, 0, 3.0))


def test_nobody_waits_for_the_turn_of_a_process_that_hangs_or_has_ended(file: int) -> None:
    clock = SetClock()
    one, two = (attached(file, index, clock=clock).bound for index in range(2))
    one.show((0, 0, 1.0), waits_for_bound=True)
    assert not two.try_take(1, (0, 0, 2.0))
    clock.now_s += 0.2
    assert two.try_take(1, (0, 0, 2.0))
    one.show((0, 0, 1.0), waits_for_bound=True)
    assert one.try_take(2, (0, 0, 1.0))
    assert not two.try_take(2, (0, 0, 2.0))
    note_ended(file, 0)
    assert two.try_take(3, (0, 0, 2.0))


def test_a_conversation_is_known_where_it_has_not_been(file: int) -> None:
    one, two = (HotRanks(attached(file, index).places) for index in range(2))
    one.note(RankId("decode-1"), session=("a", "chat"), hashes=hashes("system one"))
    assert two.find(session=("a", "chat"), hashes=[]) == "decode-1"
    assert two.find(session=("b", "chat"), hashes=hashes("system one and more")) == "decode-1"
    two.note(RankId("decode-2"), session=("a", "chat"), hashes=[])
    assert one.find(session=("a", "chat"), hashes=[]) == "decode-2"
    assert one.find(session=("achat", ""), hashes=hashes("x")) is None
    one.note(RankId("d" * 64), session=("c", "long"), hashes=[])
    assert two.find(session=("c", "long"), hashes=[]) is None


def test_a_process_that_is_started_again_knows_which_ranks_drain(file: int) -> None:
    info, other = rank("decode-0"), rank("decode-1")
    first = RankTable(Directory(info, other), drains=attached(file, 0).drains)
    first.note_draining(info)
    note_ended(file, 0)
    again, beside = (RankTable(Directory(info, other), drains=attached(file, index).drains) for index in range(2))
    for table in (again, beside):
        assert [found.rank_id for found in table.decode_ranks()] == ["decode-1"]
        assert table.takes_work(replace(info, incarnation=Incarnation(8))), "which is another process"
    again.readmit(info)
    beside.wake()
    assert all(table.takes_work(info) for table in (again, beside))


def test_a_full_set_gives_its_oldest_record_away(file: int) -> None:
    records = KeyedRecords(JointMemory(file, 0, processes=1), records=WAYS, record_bytes=8)
    keys = [blake2b(bytes([index]), digest_size=16).digest() for index in range(WAYS + 2)]
    for index, key in enumerate(keys[:WAYS]):
        assert records.put(key, now_s=1 + index)[1]
    assert not records.put(keys[0], now_s=99)[1]
    for key in keys[WAYS:]:
        assert records.put(key, now_s=100)[1]
    assert [index for index, key in enumerate(keys) if records.find(key) is None] == [1, 2]


WORKER = """
import os, sys
from itertools import count
from hashlib import blake2b
from whalepod.services.router.joint_memory import JointMemory
from whalepod.services.router.joint_parts import JointParts
from whalepod.services.router.hot_ranks import HotRanks
parts = JointParts(JointMemory(int(sys.argv[1]), 1, processes=3), running_max=10**6, queue_max=10**6)
for turn in count():
    hashes = [blake2b(b"%d %d" % (turn % 50, index)).digest()[:32] for index in range(20)]
    parts.prefixes.begin(hashes, stored_blocks=0, seconds=60.0, looked_s=None, blocks_min=1)
    with parts.tenants.opened("a") as tenant:
        tenant.concurrent += 1
    parts.bound.try_take(1, (0, 0, 0.0))
    parts.bound.try_wait(1)
    parts.bound.show((-9, 0, 0.0), waits_for_bound=True)
    parts.places.put(hashes[-1], "decode-%d" % turn)
    if turn == 20:
        print("at it", flush=True)
"""


@pytest.mark.slow
async def test_a_process_that_is_killed_at_any_point_leaves_no_lock_no_request_and_nobody_who_waits(file: int) -> None:
    survivor = attached(file, 0, running_max=10**6)
    chance = random.Random(7)
    for _ in range(12):
        process = await _started(WORKER, file)
        waited = [survivor.prefixes.longest(_prompt(turn), stored_blocks=0)[0] for turn in range(20)]
        pendings = [share.pending for share in waited if share is not None]
        assert pendings
        for pending in pendings:
            survivor.prefixes.watch(pending)
        for _ in range(chance.randrange(200)):
            survivor.bound.try_take(0, (-10, 0, 0.0))
        process.kill()
        await process.wait()
        note_ended(file, 1)
        await until(lambda pendings=pendings: all(pending.stored is False for pending in pendings))
        assert survivor.bound.running_elsewhere == 0
        assert survivor.bound.waiting_weight_elsewhere(0) == 0
        assert survivor.bound.try_take(10**6, (0, 0, 0.0))
        survivor.bound.give_back(10**6)
        with survivor.tenants.opened("a") as tenant:
            assert tenant.concurrent == 0
        for place in range(10):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        fcntl.lockf(file, fcntl.LOCK_UN)


async def _started(program: str, file: int) -> asyncio.subprocess.Process:
    """It has said its first word."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", program, str(file)),
        pass_fds=[file],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert await process.stdout.readline()
    return process


def _prompt(turn: int) -> list[BlockHash]:
    return [BlockHash(blake2b(b"%d %d" % (turn, index)).digest()[:32]) for index in range(20)]


HOLDER = """
import sys
from whalepod.services.router.joint_memory import JointMemory
memory = JointMemory(int(sys.argv[1]), 1, processes=2)
with memory.new_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


async def test_a_holder_that_stands_still_is_waited_for_once_and_a_moment(file: int) -> None:
    process = await _started(HOLDER, file)
    try:
        clock = _CountingClock()
        lock = JointMemory(file, 0, processes=2, clock=clock).new_lock()
        for _ in range(100):
            with lock:
                pass
        assert clock.now_s < 2 * HELD_S_MAX, "all but the first do not wait"
    finally:
        process.kill()
        await process.wait()
    with lock:
        pass


class _CountingClock(SetClock):
    """Each look at it takes 100 µs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += 1e-4
        return self.now_s
