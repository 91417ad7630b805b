"""Blocks in memory that all ranks of a node share (L1): what one rank has read or written, the others do not fetch.

Leaf-first LRU: only a block without cached children may go, and of those the one that was used longest ago. So a prefix
shrinks from its end, and never gets a hole. Every payload carries its checksum, judged after it has been copied out:
whatever a killed process has left behind is a miss.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from whalepod.core.clock import Clock

from . import metrics
from .node_segment import FREE, VALID, NodeSegment, SegmentBusyError
from .value_format import payload_checksum
from .value_sinks import WantedBlocks

logger = logging.getLogger(__name__)

BATCH_BLOCKS: Final = 16
"""Copied under one hold of the lock: others wait for a millisecond at most."""
TOMBSTONE: Final = 0xFFFF_FFFF
EVICTED_SHARE: Final = 128
"""One in so many slots is freed at a time, so that choosing the oldest costs little a block."""


class NodeCache:
    """Thread-safe. Nothing here raises or waits for long: a segment that is in use by somebody who has stopped is a
    miss."""

    def __init__(self, directory: Path, *, namespace: bytes, payload_bytes: int, bytes_max: int, clock: Clock) -> None:
        """Raises OSError if the directory cannot hold it."""
        slots = max(1, bytes_max // payload_bytes)
        path = directory / f"whalepod-blocks-{namespace.hex()}"
        self._segment = NodeSegment(path, namespace=namespace, slots=slots, payload_bytes=payload_bytes, clock=clock)
        self._closed = False

    @property
    def epoch(self) -> int:
        """Of the last purge."""
        return int(self._segment.head["epoch"][0])

    @property
    def slots_total(self) -> int:
        return 0 if self._closed else len(self._segment.slots)

    @property
    def slots_used(self) -> int:
        """Blocks that are here, counted without the lock: it is a figure for people."""
        return 0 if self._closed else int(np.count_nonzero(self._segment.slots["state"] == VALID))

    def read(self, blocks: WantedBlocks) -> None:
        """Fill the buffers of those that are here, up to the first that is not."""
        for start in range(0, len(blocks.keys), BATCH_BLOCKS):
            batch = range(len(blocks.keys))[start : start + BATCH_BLOCKS]
            found = self._copied(blocks, batch)
            wrong = [number for number, (checksum, _) in zip(batch, found, strict=False)
                     if payload_checksum((blocks.view(number),)) != checksum]  # fmt: skip
            for number, (_, exact) in zip(batch, found, strict=False):
                if number in wrong:
                    break
                blocks.take(number, exact=exact)
            if wrong:
                logger.error("node cache: a block is damaged and is dropped")
                self._forget([blocks.hashes[number] for number in wrong])
            if wrong or len(found) < len(batch):
                return

    def write(self, blocks: WantedBlocks, numbers: Iterable[int]) -> None:
        """Keep those of `numbers`, ascending, that have arrived."""
        arrived = [(blocks.keys[number], there) for number in numbers if (there := blocks.arrived(number)) is not None]
        self.put([(key.hash, key.parent, exact, (buffer,)) for key, (buffer, exact) in arrived])

    def put(self, blocks: Sequence[tuple[bytes, bytes, bool, tuple[memoryview, ...]]]) -> None:
        """(hash, parent, exact, payload in pieces) each, ancestors first."""
        now = 0
        for start in range(0, len(blocks), BATCH_BLOCKS):
            batch = blocks[start : start + BATCH_BLOCKS]
            checksums = [payload_checksum(pieces) for *_, pieces in batch]
            with contextlib.suppress(SegmentBusyError), self._entered() as ours:
                if not ours:
                    return
                now = now or self._tick()
                room = self._make_room(len(batch), now)
                for (block, parent, exact, pieces), checksum in zip(batch, checksums, strict=True):
                    self._keep(block, parent, exact=exact, pieces=pieces, checksum=checksum, now=now, room=room)

    def purge(self, epoch: int) -> None:
        """Drop everything, unless that was done for this epoch or a later one."""
        with contextlib.suppress(SegmentBusyError), self._entered() as ours:
            if ours and self.epoch < epoch:
                self._segment.slots["state"] = FREE
                self._rebuild()
                self._segment.head["epoch"][0] = epoch

    def close(self) -> None:
        """Idempotent. What is in the segment stays there for others."""
        if not self._closed:
            self._closed = True
            self._segment.close()

    @contextlib.contextmanager
    def _entered(self) -> Generator[bool]:
        """The segment, whole. Yields False after `close`."""
        if self._closed:
            yield False
            return
        with self._segment.locked() as was_dirty:
            if was_dirty:
                logger.warning("node cache: a process died while it changed the cache; its tables are built again")
                self._rebuild()
            yield True

    def _copied(self, blocks: WantedBlocks, numbers: Sequence[int]) -> list[tuple[int, bool]]:
        """Checksum and exactness of the leading blocks that were here, copied into their buffers."""
        found: list[tuple[int, bool]] = []
        with contextlib.suppress(SegmentBusyError), self._entered() as ours:
            now = self._tick() if ours else 0
            for number in numbers if ours else ():
                slot = self._find(blocks.hashes[number])
                if slot is None:
                    break
                entry = self._segment.slots[slot]
                if blocks.exact_only and not entry["exact"]:
                    break
                blocks.view(number)[:] = self._segment.payload(slot)
                entry["used"] = now
                found.append((int(entry["checksum"]), bool(entry["exact"])))
        return found

    def _forget(self, hashes: Iterable[bytes]) -> None:
        with contextlib.suppress(SegmentBusyError), self._entered() as ours:
            for block in hashes if ours else ():
                slot = self._find(block)
                if slot is not None:
                    self._free(slot)

    def _tick(self) -> int:
        self._segment.head["time"][0] += 1
        return int(self._segment.head["time"][0])

    def _keep(
        self,
        block: bytes,
        parent: bytes,
        *,
        exact: bool,
        pieces: Sequence[memoryview],
        checksum: int,
        now: int,
        room: list[int],
    ) -> None:
        slot = self._find(block)
        known = slot is not None and (bool(self._segment.slots[slot]["exact"]) or not exact)
        if known:
            self._segment.slots["used"][slot] = now
            return
        if slot is not None:
            self._free(slot)
            room.append(slot)
        if not room:
            return
        slot = room.pop()
        place, at = self._segment.payload(slot), 0
        for piece in pieces:
            place[at : at + len(piece)] = piece
            at += len(piece)
        entry = self._segment.slots[slot]
        entry["hash"], entry["parent"], entry["exact"] = block.hex(), parent.hex(), exact
        entry["checksum"], entry["used"], entry["children"] = checksum, now, 0
        parent_slot = self._find(parent)
        entry["parent_slot"] = -1 if parent_slot is None else parent_slot
        entry["state"] = VALID
        if parent_slot is not None:
            self._segment.slots["children"][parent_slot] += 1
        self._link(block, slot)

    def _make_room(self, blocks: int, now: int) -> list[int]:
        """Slots that hold nothing, so many if possible, made by dropping the oldest leaves that nobody uses now."""
        slots = self._segment.slots
        room = np.flatnonzero(slots["state"] == FREE)[:blocks].tolist()
        if len(room) == blocks:
            return room
        leaves = np.flatnonzero((slots["state"] == VALID) & (slots["children"] == 0) & (slots["used"] < now))
        count = max(blocks - len(room), len(slots) // EVICTED_SHARE)
        oldest = leaves[np.argsort(slots["used"][leaves], kind="stable")[:count]]
        heap = [(int(slots["used"][slot]), int(slot)) for slot in oldest]  # sorted, so it is a heap
        freed: list[int] = []
        while heap and len(freed) < count:
            _, slot = heapq.heappop(heap)
            parent = int(slots["parent_slot"][slot])
            self._free(slot)
            freed.append(slot)
            if parent >= 0 and not slots["children"][parent] and slots["used"][parent] < now:
                heapq.heappush(heap, (int(slots["used"][parent]), parent))
        metrics.NODE_CACHE_EVICTED.inc(len(freed))
        return room + freed

    def _free(self, slot: int) -> None:
        """Its children, if it has any, stay: they are found by name, and are leaves' ancestors all the same."""
        entry = self._segment.slots[slot]
        entry["state"] = FREE
        if entry["parent_slot"] >= 0:
            self._segment.slots["children"][entry["parent_slot"]] -= 1
        if entry["children"]:
            orphans = np.flatnonzero(self._segment.slots["parent_slot"] == slot)
            self._segment.slots["parent_slot"][orphans] = -1
            entry["children"] = 0
        entry["parent_slot"] = -1
        self._unlink(bytes.fromhex(entry["hash"].decode()))

    # The table: open addressing from a hash's first bytes to its slot plus one.

    def _probe(self, block: bytes) -> Iterable[int]:
        mask = len(self._segment.table) - 1
        at = int.from_bytes(block[:8], "little") & mask
        for _ in range(mask + 1):
            yield at
            at = (at + 1) & mask

    def _find(self, block: bytes) -> int | None:
        name = block.hex().encode()
        for at in self._probe(block):
            entry = int(self._segment.table[at])
            if entry == 0:
                return None
            if entry != TOMBSTONE and self._segment.slots[entry - 1]["hash"] == name:
                return entry - 1
        return None

    def _link(self, block: bytes, slot: int) -> None:
        for at in self._probe(block):
            if self._segment.table[at] in (0, TOMBSTONE):
                self._segment.table[at] = slot + 1
                return

    def _unlink(self, block: bytes) -> None:
        name = block.hex().encode()
        for at in self._probe(block):
            entry = int(self._segment.table[at])
            if entry == 0:
                return
            if entry != TOMBSTONE and self._segment.slots[entry - 1]["hash"] == name:
                self._segment.table[at] = TOMBSTONE
                break
        self._segment.head["tombstones"][0] += 1
        if int(self._segment.head["tombstones"][0]) > len(self._segment.table) // 4:
            self._rebuild()

    def _rebuild(self) -> None:
        """Table and family from the slots' own fields."""
        slots, table = self._segment.slots, self._segment.table
        table[:] = 0
        self._segment.head["tombstones"][0] = 0
        slots["children"] = 0
        slots["parent_slot"] = -1
        valid = np.flatnonzero(slots["state"] == VALID)
        by_name = {bytes(slots["hash"][slot]): int(slot) for slot in valid}
        for name, slot in by_name.items():
            self._link(bytes.fromhex(name.decode()), slot)
            parent_slot = by_name.get(bytes(slots["parent"][slot]))
            if parent_slot is not None:
                slots["parent_slot"][slot] = parent_slot
                slots["children"][parent_slot] += 1
