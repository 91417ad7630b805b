"""A store in this process that misbehaves by a seed, behind the same interface as the real one.

Each key of each operation is one step, and each step draws one fault. Time is virtual: a delay moves the clock, and an
answer that would come after the deadline does not come at all. So one integer gives the same run every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from whalepod.core.clock import Deadline

from .transport import Place, Renewal, ValueSink, ValueSinks, ValuesToWrite, ValueToWrite, Written
from .value_format import HEADER_BYTES

LOST_WRITES_MAX = 8
"""Newest writes that a fail-over may lose."""


class Fault(Enum):
    NONE = "none"
    DROP = "drop"
    """No answer: the rest of the batch is not answered either."""
    DELAY = "delay"
    DUPLICATE = "duplicate"
    """The operation happens twice."""
    CORRUPT = "corrupt"
    """One bit of the value has changed."""
    TRUNCATE = "truncate"
    """The value has another length."""
    SWAP = "swap"
    """Another value lies under the key."""
    FAIL_OVER = "fail_over"
    """The newest writes are gone."""
    OUT_OF_MEMORY = "out_of_memory"
    """Writes are refused."""
    EVICT = "evict"
    """A value is gone just before it is asked for."""


@dataclass(slots=True)
class VirtualClock:
    """Time that passes only when somebody says so."""

    now_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return int(self.now_s * 1000)


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """How likely each fault is at each step; what is left is NONE."""

    seed: int
    rates: Mapping[Fault, float]
    delay_s_max: float = 0.2


@dataclass(slots=True, eq=False)
class FaultyPlace:
    """Its one server."""

    name: str = "faulty"
    available: bool = True
    disabled_by: str | None = None
    read_bytes_per_s: float | None = None
    corrupt: int = 0

    @property
    def is_local(self) -> bool:
        return True

    def note_corrupt(self) -> None:
        self.corrupt += 1


@dataclass(slots=True)
class FaultyTransport:
    """For one thread. `values` is what it holds, `steps` counts the faults drawn, `evicted` the values lost by
    `Fault.EVICT`."""

    schedule: FaultSchedule
    clock: VirtualClock
    values: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    place: FaultyPlace = field(default_factory=FaultyPlace)
    steps: int = 0
    evicted: int = 0
    _draw: Random = field(init=False)
    _written: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        self._draw = Random(self.schedule.seed)

    @property
    def shards(self) -> Sequence[Place]:
        return (self.place,)

    @property
    def bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def shard_of(self, key: bytes) -> Place:  # noqa: ARG002  there is one
        return self.place

    def exists(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bool] | None:  # noqa: ARG002
        found: list[bool] = []
        for key in keys:
            if self._step(key, deadline) is Fault.DROP:
                return None
            found.append(key in self.values)
        return found

    def ask(self, keys: Sequence[bytes]) -> None:
        """Not here."""

    def read(
        self,
        shard: Place,  # noqa: ARG002
        sinks: ValueSinks,
        *,
        value_bytes: int,  # noqa: ARG002
        renewals: Sequence[Renewal] = (),  # noqa: ARG002
        deadline: Deadline,
    ) -> bool:
        for item, key in enumerate(sinks.keys):
            fault = self._step(key, deadline)
            if fault is Fault.DROP:
                return False
            value = self.values.get(key)
            if value is not None:
                self._give(sinks[item], self._spoilt(value, fault))
        return True

    def write(
        self,
        shard: Place,  # noqa: ARG002
        values: ValuesToWrite,
        *,
        only_if_absent: bool,
        deadline: Deadline,
    ) -> list[Written]:
        outcomes = [Written.UNKNOWN] * len(values.keys)
        for index, key in enumerate(values.keys):
            fault, value = self._step(key, deadline), values[index]
            if fault is Fault.DROP:
                if self._draw.random() < 0.5:  # the answer was lost, not the write
                    self._keep(value, only_if_absent=only_if_absent)
                break
            if fault is Fault.OUT_OF_MEMORY:
                outcomes[index] = Written.DROPPED
                continue
            outcomes[index] = self._keep(value, only_if_absent=only_if_absent)
            if fault is Fault.DUPLICATE:
                self._keep(value, only_if_absent=only_if_absent)
        return outcomes

    def heads(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bytes] | None:  # noqa: ARG002
        heads: list[bytes] = []
        for key in keys:
            if self._step(key, deadline) is Fault.DROP:
                return None
            heads.append(self.values.get(key, b"")[:HEADER_BYTES])
        return heads

    def replace_if(self, shard: Place, value: ValueToWrite, *, head: bytes, deadline: Deadline) -> bool:  # noqa: ARG002
        if self._step(value.key, deadline) is Fault.DROP or not self.values.get(value.key, b"").startswith(head):
            return False
        self._keep(value, only_if_absent=False)
        return True

    def delete_if(
        self,
        shard: Place,  # noqa: ARG002
        key: bytes,
        *,
        head: bytes,
        value_bytes: int,
        deadline: Deadline,
    ) -> bool:
        if self._step(key, deadline) is Fault.DROP:
            return False
        value = self.values.get(key)
        if value is None or len(value) != value_bytes or not value.startswith(head):
            return False
        del self.values[key]
        return True

    def renew(self, shard: Place, renewals: Sequence[Renewal], *, deadline: Deadline) -> bool:  # noqa: ARG002
        return all(self._step(renewal.key, deadline) is not Fault.DROP for renewal in renewals)

    def unlink(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> int:  # noqa: ARG002
        removed = 0
        for key in keys:
            if self._step(key, deadline) is Fault.DROP:
                break
            removed += self.values.pop(key, None) is not None
        return removed

    def close(self) -> None:
        self.values.clear()

    def _step(self, key: bytes, deadline: Deadline) -> Fault:
        """What happens now. DROP also stands for an answer that would come too late."""
        self.steps += 1
        before_s = self.clock.now_s
        fault = self._drawn()
        match fault:
            case Fault.DELAY:
                self.clock.now_s += self._draw.uniform(0.0, self.schedule.delay_s_max)
            case Fault.DROP:
                self.clock.now_s = max(self.clock.now_s, deadline.at_s)
            case Fault.EVICT:
                self.evicted += self.values.pop(key, None) is not None
            case Fault.FAIL_OVER:
                for lost in self._written[-self._draw.randint(1, LOST_WRITES_MAX) :]:
                    self.values.pop(lost, None)
            case _:
                pass
        if self.clock.now_s >= deadline.at_s:
            self.clock.now_s = max(before_s, deadline.at_s)  # nobody waits longer
            return Fault.DROP
        return fault

    def _drawn(self) -> Fault:
        point = self._draw.random()
        for fault, rate in self.schedule.rates.items():
            if point < rate:
                return fault
            point -= rate
        return Fault.NONE

    def _spoilt(self, value: bytes, fault: Fault) -> bytes:
        match fault:
            case Fault.CORRUPT:
                at = self._draw.randrange(8 * len(value))
                changed = bytearray(value)
                changed[at // 8] ^= 1 << at % 8
                return bytes(changed)
            case Fault.TRUNCATE:
                return (value + bytes(64))[: self._draw.randrange(len(value) + 64)]
            case Fault.SWAP:
                return self.values[self._draw.choice(list(self.values))]
            case _:
                return value

    def _give(self, sink: ValueSink, value: bytes) -> None:
        places = sink.open(value[:HEADER_BYTES], len(value))
        at = HEADER_BYTES
        for place in places or ():
            place[:] = value[at : at + len(place)]
            at += len(place)
        if places is not None:
            sink.finish()

    def _keep(self, value: ValueToWrite, *, only_if_absent: bool) -> Written:
        if only_if_absent and value.key in self.values:
            return Written.PRESENT
        self.values[value.key] = b"".join(value.pieces)
        self._written.append(value.key)
        del self._written[:-LOST_WRITES_MAX]
        return Written.STORED
