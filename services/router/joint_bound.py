"""How many requests run and wait in all processes of a router, against what the operator wrote.

Each process writes its own record, under a lock that all take who count. A request that may run as far as its ranks
go, and waits only for this bound, is shown to the others: they leave what comes free to the first in turn.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from .admission_bound import Turn
from .joint_memory import JointMemory

SEEN_S: Final = 0.1
"""A process that has not looked for its turn for so long is busy or hangs: nobody waits for it."""

_RECORD: Final = struct.Struct("=Iiiiiiidd")
_RECORD_BYTES: Final = 64


class _Record(NamedTuple):
    """Of one process. `shows`: whether its first in turn waits for the bound alone; `first` and `arrived_s` say who
    that is, and `looked_s` when it looked last."""

    run: int
    running: int = 0
    waiting: int = 0
    waiting_weight: int = 0
    shows: int = 0
    priority: int = 0
    tenant_running: int = 0
    arrived_s: float = 0.0
    looked_s: float = 0.0


class JointBound:
    """For one event loop."""

    def __init__(self, memory: JointMemory, *, running_max: int, queue_max: int) -> None:
        self._running_max = running_max
        self._queue_max = queue_max
        self._memory = memory
        self._clock = memory.clock
        self._lock = memory.new_lock()
        self._at = memory.take(_RECORD_BYTES * memory.processes)
        self._own = _Record(memory.run)
        self._write()

    @property
    def running_elsewhere(self) -> int:
        return sum(record.running for record in self._others())

    def waiting_weight_elsewhere(self, priority: int) -> int:
        """Of requests that would go before one of this priority, as far as is known."""
        return sum(record.waiting_weight for record in self._others() if record.priority <= priority)

    def try_take(self, weight: int, turn: Turn) -> bool:
        with self._lock:
            others = list(self._others())
            running = self._own.running + sum(record.running for record in others)
            seen_s = self._clock.monotonic_s() - SEEN_S
            fits = running + weight <= self._running_max and not any(
                record.shows and record.looked_s >= seen_s and record[5:8] < turn for record in others
            )
            if fits:
                self._own = self._own._replace(running=self._own.running + weight)
                self._write()
            return fits

    def give_back(self, weight: int) -> None:
        with self._lock:
            self._own = self._own._replace(running=self._own.running - weight)
            self._write()

    def try_wait(self, weight: int) -> bool:
        with self._lock:
            waiting = self._own.waiting + sum(record.waiting for record in self._others())
            if waiting >= self._queue_max:
                return False
            self._wait(1, weight)
            return True

    def waits_no_more(self, weight: int) -> None:
        with self._lock:
            self._wait(-1, -weight)

    def show(self, first: Turn | None, *, waits_for_bound: bool) -> None:
        priority, tenant_running, arrived_s = first or (0, 0, 0.0)
        self._own = self._own._replace(
            shows=int(first is not None and waits_for_bound),
            priority=priority,
            tenant_running=tenant_running,
            arrived_s=arrived_s,
            looked_s=self._clock.monotonic_s(),
        )
        with self._lock:
            self._write()

    def _wait(self, requests: int, weight: int) -> None:
        own = self._own
        self._own = own._replace(waiting=own.waiting + requests, waiting_weight=own.waiting_weight + weight)
        self._write()

    def _write(self) -> None:
        _RECORD.pack_into(self._memory.bytes, self._at + _RECORD_BYTES * self._memory.process, *self._own)

    def _others(self) -> Iterator[_Record]:
        """Records of the other processes that are alive."""
        for process in range(self._memory.processes):
            if process != self._memory.process:
                record = _Record(*_RECORD.unpack_from(self._memory.bytes, self._at + _RECORD_BYTES * process))
                if record.run == self._memory.run_of(process):
                    yield record
