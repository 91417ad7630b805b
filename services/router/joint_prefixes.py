"""Prefixes that any process of this router computes, so that a preamble is computed once and not once a process.

begin ─▶ the computation, and some blocks that name it ─▶ (others: longest ─▶ watch, by looking every few ms) ─▶ end

Of a long prompt not every block is told, but eight for each doubling of its length: the prefix that others find is at
most an eighth too short, until it is stored and the store says how long it is.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from whalepod.core.block_keys import BlockHash

from .joint_memory import JointMemory
from .joint_records import KEY_BYTES, KeyedRecords
from .pending_prefixes import BLOCKS_MAX, Name, Pending, Share

LOOK_S: Final = 0.005
"""Between two looks at what is waited for."""
COMPUTATIONS_MAX: Final = 16_384
"""Of one process, the newest."""
EVERY_BLOCK_TO: Final = 16
"""Deeper ones are told more and more rarely."""

_NAME: Final = struct.Struct("=QI")
_NUMBER: Final = struct.Struct("=Q")
_BODY: Final = struct.Struct("=IIddd")
"""First block, blocks, when it began, when it is expected, when it ended (monotonic seconds)."""
_STATE: Final = struct.Struct("=I")
_RUNS, _STORED, _NOT_STORED = range(3)
_COMPUTATION_BYTES: Final = 64
_RUN_SHIFT: Final = 32
"""A number begins with the run of its process: those of the dead are known by it."""


class PrefixTakenError(Exception):
    """Somebody has begun to compute a prefix since it was looked for: look again."""


class JointPrefixes:
    """For one event loop."""

    def __init__(self, memory: JointMemory) -> None:
        self._memory = memory
        self._bytes = memory.bytes
        self._clock = memory.clock
        self._lock = memory.new_lock()
        self._blocks = KeyedRecords(memory, records=BLOCKS_MAX, record_bytes=_NAME.size)
        self._computations_at = memory.take(memory.processes * COMPUTATIONS_MAX * _COMPUTATION_BYTES)
        self._number = memory.run << _RUN_SHIFT
        self._watched: dict[Name, Pending] = {}

    def longest(self, hashes: Sequence[BlockHash], *, stored_blocks: int) -> tuple[Share | None, float]:
        """As of `PendingPrefixes`, whoever computes it; and when that was (monotonic seconds)."""
        with self._lock:
            return self._longest(hashes, stored_blocks), self._clock.monotonic_s()

    def begin(
        self,
        hashes: Sequence[BlockHash],
        *,
        stored_blocks: int,
        seconds: float,
        looked_s: float | None,
        blocks_min: int,
    ) -> Name:
        """A rank computes the blocks after the first `stored_blocks`. Raises PrefixTakenError if somebody has begun at
        least `blocks_min` of them after `looked_s`; None: nobody has looked, and it begins."""
        with self._lock:
            share = self._longest(hashes, stored_blocks) if looked_s is not None else None
            if share is not None and share.depth_blocks - stored_blocks >= blocks_min:
                assert looked_s is not None
                if share.pending.began_s > looked_s:
                    raise PrefixTakenError
            self._number += 1
            name = (self._number, self._memory.process)
            # The clock is read under the lock: who has looked before it cannot have seen this.
            now_s = self._clock.monotonic_s()
            self._write(name, _BODY.pack(stored_blocks, len(hashes), now_s, now_s + seconds, 0.0))
            for depth in told_depths(stored_blocks, len(hashes)):
                self._tell(hashes[depth - 1], name, now_s)
            return name

    def end(self, name: Name, *, stored: bool) -> None:
        """It is over: all of it is stored, or nobody knows."""
        with self._lock:
            at = self._computation(name)
            if _NUMBER.unpack_from(self._bytes, at)[0] == name[0]:  # else it is long forgotten
                ended_at = at + _NUMBER.size + _BODY.size
                struct.pack_into("=d", self._bytes, ended_at - 8, self._clock.monotonic_s())
                _STATE.pack_into(self._bytes, ended_at, _STORED if stored else _NOT_STORED)

    def watch(self, pending: Pending) -> None:
        """One that `longest` found: from now on `pending.ended` is set when it ends, or its process does."""
        assert pending.name is not None
        if not self._watched:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)
        self._watched[pending.name] = pending

    def _look(self) -> None:
        with self._lock:
            for name, pending in list(self._watched.items()):
                found = self._read(name)
                if found is None or found.stored is not None:
                    del self._watched[name]
                    pending.end(
                        stored=found is not None and bool(found.stored),
                        now_s=self._clock.monotonic_s() if found is None else found.ended_s,
                    )
        if self._watched:
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _longest(self, hashes: Sequence[BlockHash], stored_blocks: int) -> Share | None:
        """By halving, as blocks are told in order."""
        depths = told_depths(stored_blocks, len(hashes))
        now_s = self._clock.monotonic_s()
        told = bisect_left(depths, True, key=lambda depth: self._at(hashes[depth - 1], now_s) is None)
        pending = self._at(hashes[depths[told - 1] - 1], now_s) if told else None
        return None if pending is None else Share(depths[told - 1], pending, exact=False)

    def _at(self, block: BlockHash, now_s: float) -> Pending | None:
        """What computes the block, or stored it a moment ago."""
        at = self._blocks.find(_key(block))
        if at is None:
            return None
        name: Name = _NAME.unpack_from(self._bytes, at)
        pending = self._watched.get(name) or self._read(name)
        return pending if pending is not None and pending.is_current(now_s) else None

    def _tell(self, block: BlockHash, name: Name, now_s: float) -> None:
        """Blocks that somebody computes stay his."""
        at, is_new = self._blocks.put(_key(block), now_s=now_s)
        if is_new or not self._runs(_NAME.unpack_from(self._bytes, at)):
            _NAME.pack_into(self._bytes, at, *name)

    def _runs(self, name: Name) -> bool:
        at = self._find(name)
        return at is not None and _STATE.unpack_from(self._bytes, at + _NUMBER.size + _BODY.size)[0] == _RUNS

    def _write(self, name: Name, body: bytes) -> None:
        """The number last: whoever dies in between has written nothing."""
        at = self._computation(name)
        _NUMBER.pack_into(self._bytes, at, 0)
        self._bytes[at + _NUMBER.size : at + _NUMBER.size + _BODY.size] = body
        _STATE.pack_into(self._bytes, at + _NUMBER.size + _BODY.size, _RUNS)
        _NUMBER.pack_into(self._bytes, at, name[0])

    def _read(self, name: Name) -> Pending | None:
        at = self._find(name)
        if at is None:
            return None
        first_block, blocks, began_s, expected_s, ended_s = _BODY.unpack_from(self._bytes, at + _NUMBER.size)
        (state,) = _STATE.unpack_from(self._bytes, at + _NUMBER.size + _BODY.size)
        stored = None if state == _RUNS else state == _STORED
        return Pending(first_block, blocks, began_s, expected_s, stored, ended_s, name=name)

    def _find(self, name: Name) -> int | None:
        """None: it is forgotten, or its process has ended."""
        number, process = name
        if process >= self._memory.processes or number >> _RUN_SHIFT != self._memory.run_of(process):
            return None
        at = self._computation(name)
        return at if _NUMBER.unpack_from(self._bytes, at)[0] == number else None

    def _computation(self, name: Name) -> int:
        number, process = name
        return self._computations_at + _COMPUTATION_BYTES * (process * COMPUTATIONS_MAX + number % COMPUTATIONS_MAX)


def told_depths(stored_blocks: int, blocks: int) -> list[int]:
    """Of a prompt of so many blocks, how many each told prefix has, beyond those that are stored: the same for all
    prompts, but for the last."""
    depths = list(range(stored_blocks + 1, min(blocks, EVERY_BLOCK_TO) + 1))
    step, octave = 2, EVERY_BLOCK_TO
    while octave < blocks:
        first = max(octave, stored_blocks) // step * step + step
        depths += range(first, min(blocks, 2 * octave) + 1, step)
        octave, step = 2 * octave, 2 * step
    if (depths and depths[-1] != blocks) or (not depths and blocks > stored_blocks):
        depths.append(blocks)
    return depths


def _key(block: BlockHash) -> bytes:
    """Names of blocks are hashes: their beginnings tell them apart."""
    return block[:KEY_BYTES].ljust(KEY_BYTES, b"\0")
