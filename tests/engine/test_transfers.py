"""Transfers: order, bounds, and one answer for everything that is asked, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from tests.engine.memory_store import MemoryStore
from whalepod.core.block_keys import BlockHash, BlockKey, block_keys
from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.engine.host_copies import Copied
from whalepod.engine.state_store import Answer, HandoffWritten, Loaded, LoadJob, Owner, OwnSnapshot, RoomFreed
from whalepod.engine.transfers import BlockWrite, SnapshotWrite, Transfers
from whalepod.kvstore.client import BlockToPut
from whalepod.kvstore.value_format import PartKind, SnapshotValue

BYTES = 100
OWNER = Owner(RequestId(b"a" * 16), 1, 1)
OTHER = Owner(RequestId(b"b" * 16), 1, 1)
SNAPSHOT = SnapshotValue(boundary_tokens=5, mode=1, parts={PartKind.STATE: b"state"})


def _keys(count: int) -> Sequence[BlockKey]:
    return block_keys([BlockHash(bytes([depth + 1]) * 32) for depth in range(count)], root=BlockHash(bytes(32)))


def _block(depth: int, owner: Owner | None) -> BlockWrite:
    block = BlockToPut(_keys(depth + 1)[depth], memoryview(bytes([depth]) * BYTES), exact=True)
    return BlockWrite(Copied(block), BYTES, owner, Deadline.after(10))


def _snapshot(owner: Owner | None, key: bytes = b"h:x") -> SnapshotWrite:
    return SnapshotWrite(key, Copied(SNAPSHOT), 60.0, 5, owner, Deadline.after(10))


class _World:
    def __init__(self, store: MemoryStore | None = None, *, queue_bytes_max: int = 10_000) -> None:
        self.store = store or MemoryStore()
        self.answers: list[Answer] = []
        self.transfers = Transfers(
            self.store,
            block_bytes=BYTES,
            new_buffer=lambda size: memoryview(bytearray(size)),
            queue_bytes_max=queue_bytes_max,
            write_timeout_s=1.0,
            deliver=self.answers.append,
        )

    def work(self) -> list[Answer]:
        while self.transfers.work_on_write(wait=False) or self.transfers.work_on_load(wait=False):
            pass
        answers, self.answers[:] = list(self.answers), []
        return answers


def _job(keys: Sequence[BlockKey], *, present: int = 0, own: bytes | None = None, exact: bool = False) -> LoadJob:
    return LoadJob(
        owner=OWNER,
        keys=keys,
        blocks_present=present,
        blocks_wanted=len(keys),
        confirm_present=present > 0,
        exact_only=exact,
        deadline=Deadline.after(10),
        own_snapshots=() if own is None else (OwnSnapshot(own, len(keys)),),
        turn_snapshot=lambda blocks: b"t:%d" % blocks if blocks else None,
    )


def _stored(count: int, *, exact: int | None = None) -> MemoryStore:
    blocks = {key.hash: (bytes([key.depth]) * BYTES, exact is None or key.depth < exact) for key in _keys(count)}
    return MemoryStore(blocks=blocks)


def test_a_load_brings_the_blocks_after_those_present_up_to_the_first_that_is_missing() -> None:
    world = _World(_stored(40))
    del world.store.blocks[_keys(40)[37].hash]
    world.transfers.load(_job(_keys(40), present=3))
    (loaded,) = world.work()
    assert isinstance(loaded, Loaded)
    assert [payload[0] for payload in loaded.payloads] == list(range(3, 37))
    assert loaded.exact == [True] * 34
    assert loaded.present_stored == 3


def test_the_store_is_told_of_uses_after_everything_that_is_to_be_written() -> None:
    world = _World()
    keys = _keys(3)
    world.transfers.touch([key.hash for key in keys], root=keys[0].parent)
    world.transfers.write(_block(0, None))
    assert world.transfers.work_on_write(wait=False)
    assert (world.store.calls, world.store.touched) == (["put 1"], [])
    world.work()
    assert world.store.touched == [keys]


def test_the_store_is_told_of_a_long_chain_run_by_run_and_what_comes_meanwhile_goes_first() -> None:
    world = _World()
    keys = _keys(40)
    world.transfers.touch([key.hash for key in keys], root=keys[0].parent)
    assert world.transfers.work_on_write(wait=False)
    world.transfers.write(_block(0, OWNER))
    assert world.transfers.work_on_write(wait=False)
    assert (world.store.calls, world.store.touched) == (["put 1"], [keys[:16]])
    world.work()
    assert world.store.touched == [keys[:16], keys[16:32], keys[32:]]


def test_a_store_that_does_not_answer_is_told_of_no_other_use_that_is_queued() -> None:
    world = _World(MemoryStore(takes=lambda: False))
    keys = _keys(40)
    for _ in range(3):
        world.transfers.touch([key.hash for key in keys], root=keys[0].parent)
    world.work()
    assert world.store.touched == [keys[:16]]
    world.transfers.touch([keys[0].hash], root=keys[0].parent)
    world.work()
    assert world.store.touched == [keys[:16], keys[:1]]


def test_uses_that_the_store_is_not_told_of_do_not_pile_up() -> None:
    world = _World()
    for _ in range(1000):
        world.transfers.touch([BlockHash(bytes(32))], root=BlockHash(bytes(32)))
    world.work()
    assert len(world.store.touched) == 64


def test_a_cold_prefix_costs_one_small_read() -> None:
    world = _World()
    world.transfers.load(_job(_keys(200)))
    (loaded,) = world.work()
    assert isinstance(loaded, Loaded)
    assert not loaded.payloads
    assert world.store.calls == ["fetch 16"]


def test_a_long_prefix_comes_in_growing_reads_that_end_at_runs() -> None:
    world = _World(_stored(200))
    world.transfers.load(_job(_keys(200), present=5))
    world.work()
    assert [call for call in world.store.calls if call.startswith("fetch")] == [
        "fetch 11",
        "fetch 32",
        "fetch 64",
        "fetch 88",
    ]


def test_snapshots_are_looked_for_where_the_blocks_end() -> None:
    world = _World(_stored(4, exact=3))
    world.store.snapshots = {b"h:own": SNAPSHOT, b"t:3": SNAPSHOT, b"t:4": SNAPSHOT}
    world.transfers.load(_job(_keys(6), own=b"h:own", exact=True))
    (loaded,) = world.work()
    assert isinstance(loaded, Loaded)
    assert (len(loaded.payloads), loaded.own_snapshot, loaded.turn_snapshot) == (3, SNAPSHOT, SNAPSHOT)
    assert b"h:own" in world.store.snapshots


def test_a_handoff_is_answered_after_all_its_writes_in_order() -> None:
    world = _World()
    for depth in range(20):
        world.transfers.write(_block(depth, OWNER))
    world.transfers.write(_snapshot(OWNER))
    assert world.work() == [HandoffWritten(OWNER, stored=True, blocks_stored=20)]
    assert world.store.calls == ["put 16", "put 4", "put_snapshot"]


def test_a_refused_block_fails_the_handoff_and_saves_its_other_writes() -> None:
    taken = iter([True, False])
    world = _World(MemoryStore(takes=lambda: next(taken)))
    for depth in range(20):
        world.transfers.write(_block(depth, OWNER))
    world.transfers.write(_snapshot(OWNER))
    assert world.work() == [HandoffWritten(OWNER, stored=False, blocks_stored=1)]
    assert world.store.calls == ["put 16"]


def test_a_refused_snapshot_fails_the_handoff() -> None:
    taken = iter([True, False])
    world = _World(MemoryStore(takes=lambda: next(taken)))
    world.transfers.write(_block(0, OWNER))
    world.transfers.write(_snapshot(OWNER))
    assert world.work() == [HandoffWritten(OWNER, stored=False, blocks_stored=1)]


def test_handoffs_come_before_what_may_be_dropped_and_owners_are_not_mixed() -> None:
    world = _World()
    world.transfers.write(_block(0, None))
    world.transfers.write(_snapshot(None, b"t:x"))
    world.transfers.write(_block(1, OWNER))
    world.transfers.write(_block(2, OTHER))
    world.transfers.write(_snapshot(OTHER))
    world.transfers.write(_snapshot(OWNER, b"h:y"))
    answers = world.work()
    assert [answer.owner for answer in answers if isinstance(answer, HandoffWritten)] == [OTHER, OWNER]
    assert world.store.calls == ["put 1", "put 1", "put_snapshot", "put_snapshot", "put 1", "put_snapshot"]
    assert list(world.store.snapshots) == [b"h:x", b"h:y", b"t:x"]


def test_a_full_queue_takes_nothing_that_may_be_dropped_and_tells_handoffs_when_to_ask_again() -> None:
    world = _World(queue_bytes_max=250)
    world.transfers.write(_block(0, OWNER))
    world.transfers.write(_block(1, OWNER))
    assert not world.transfers.has_room(BYTES, owner=None)
    assert not world.transfers.has_room(BYTES, owner=OWNER)
    assert RoomFreed() in world.work()
    assert world.transfers.has_room(BYTES, owner=OWNER)
    world.transfers.write(_block(2, OWNER))
    assert RoomFreed() not in world.work()


def test_a_single_write_larger_than_the_queue_still_goes_through_for_a_handoff() -> None:
    world = _World(queue_bytes_max=10)
    assert world.transfers.has_room(BYTES, owner=OWNER)
    assert not world.transfers.has_room(BYTES, owner=None)


def test_a_dropped_owner_is_neither_written_nor_answered() -> None:
    world = _World()
    world.transfers.load(_job(_keys(2)))
    world.transfers.write(_block(0, OWNER))
    world.transfers.write(_snapshot(OWNER))
    world.transfers.write(_block(1, OTHER))
    world.transfers.drop(OWNER)
    assert world.work() == []
    assert world.store.calls == ["put 1"]
    assert world.transfers.has_room(9_900, owner=OWNER)


def test_blocks_of_an_owner_that_was_let_go_are_still_written() -> None:
    world = _World()
    world.transfers.write(_block(0, OWNER))
    world.transfers.let_go(OWNER)
    assert world.work() == []
    assert world.store.calls == ["put 1"]


def test_a_store_that_raises_is_a_miss_and_a_write_not_taken() -> None:
    def broken() -> bool:
        raise RuntimeError("a bug in the client")

    world = _World(MemoryStore(blocks=_stored(3).blocks, takes=broken, has=broken))
    world.transfers.load(_job(_keys(3)))
    world.transfers.write(_block(0, OWNER))
    world.transfers.write(_snapshot(OWNER))
    world.transfers.unlink(b"h:x")
    answers = world.work()
    assert HandoffWritten(OWNER, stored=False, blocks_stored=0) in answers
    assert [answer.payloads for answer in answers if isinstance(answer, Loaded)] == [()]


def test_unlinked_keys_are_gone() -> None:
    world = _World(MemoryStore(snapshots={b"h:x": SNAPSHOT, b"h:y": SNAPSHOT}))
    world.transfers.unlink(b"h:x")
    world.work()
    assert list(world.store.snapshots) == [b"h:y"]


def test_what_is_unlinked_before_it_was_written_is_not_written() -> None:
    world = _World()
    world.transfers.write(_snapshot(None, b"c:x"))
    world.transfers.write(_snapshot(None, b"c:y"))
    world.transfers.unlink(b"c:x")
    world.work()
    assert list(world.store.snapshots) == [b"c:y"]
    assert world.transfers.has_room(10_000, owner=None), "its bytes are free"


def test_closing_wakes_waiting_workers() -> None:
    world = _World()
    done: list[bool] = []
    workers = [
        threading.Thread(target=lambda work=work: done.append(work(wait=True)))
        for work in (world.transfers.work_on_load, world.transfers.work_on_write)
    ]
    for worker in workers:
        worker.start()
    world.transfers.close()
    for worker in workers:
        worker.join(timeout=10)
    assert done == [False, False]


def _drained(world: _World) -> list[int]:
    """Depths of the blocks, in the order in which they are written."""
    world.work()
    return [payload[0][0] for payload in world.store.blocks.values()]


def test_blocks_met_before_go_first_and_push_out_those_that_were_not() -> None:
    world = _World(queue_bytes_max=3 * BYTES)
    shared = _keys(9)[8].hash
    for depth in (0, 1, 2):
        world.transfers.write(_block(depth, None))
    assert not world.transfers.has_room(BYTES, owner=None, block=shared)
    assert world.transfers.has_room(BYTES, owner=None, block=shared)
    world.transfers.write(_block(8, None))
    assert not world.transfers.has_room(BYTES, owner=None, block=_keys(10)[9].hash)
    world.transfers.write(_block(5, OWNER))
    assert _drained(world) == [5, 8, 0, 1]


def test_blocks_met_before_are_not_pushed_out_by_one_another() -> None:
    world = _World(queue_bytes_max=2 * BYTES)
    for _ in range(2):
        world.transfers.write(_block(0, None))
        world.transfers.write(_block(1, None))
        world.work()
    world.transfers.write(_block(0, None))
    world.transfers.write(_block(1, None))
    third = _keys(3)[2].hash
    assert not world.transfers.has_room(BYTES, owner=None, block=third)
    assert not world.transfers.has_room(BYTES, owner=None, block=third)


def test_a_hand_off_that_nobody_has_read_is_unlinked_when_its_requests_time_is_over() -> None:
    world = _World()
    world.transfers.write(replace(_snapshot(OWNER), deadline=Deadline.after(1.0)))
    world.transfers.write(replace(_snapshot(None, b"t:turn"), deadline=Deadline.after(1.0)))
    world.work()
    assert set(world.store.snapshots) == {b"h:x", b"t:turn"}
    assert world.transfers.work_on_write(wait=True), "it wakes up by itself"
    assert set(world.store.snapshots) == {b"t:turn"}


def test_bytes_that_wait_are_told_until_a_worker_takes_them() -> None:
    world = _World()
    world.transfers.write(_block(0, OWNER))
    world.transfers.write(_block(1, None))
    world.transfers.write(_snapshot(OWNER))
    assert world.transfers.queued_bytes == 2 * BYTES + 5
    assert world.transfers.work_on_write(wait=False)
    assert world.transfers.queued_bytes == BYTES + 5
    world.work()
    assert world.transfers.queued_bytes == 0
