"""Plays the failure table (`kvstore.md` §8) against the client: is a byte ever wrong, does a call ever end late?

One case is one seed: a few chains of blocks that several clients write, look up and fetch again and again while the
store misbehaves in one way, or in all of them. What a fetch returns must be a prefix of the chain, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from whalepod.core.block_keys import BlockKey, block_keys, chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.core.ids import Incarnation, RequestId

from .client import BlockToPut, KvClient
from .faulty_transport import Fault, FaultSchedule, FaultyTransport, VirtualClock
from .settings import StoreSettings
from .store_keys import handoff_snapshot_key
from .value_format import BlockLayout, FormatId, PartKind, SnapshotValue

NAMESPACE = bytes(16)
BLOCK_TOKENS = 16
LAYOUT = BlockLayout.from_layers(
    block_tokens=BLOCK_TOKENS, format_id=FormatId.FLOAT32, global_kv={0: 96, 1: 32}, index_keys={0: 32}
)
LATE_S = 0.05
"""What a call may take past its deadline."""
ROUNDS = 24
MAC_KEY = b"m" * 32
MIXED: Mapping[Fault, float] = {fault: 0.02 for fault in Fault if fault is not Fault.NONE}


@dataclass(slots=True)
class FaultReport:
    """Cases played, and in how many calls of them something was wrong or late."""

    cases: int = 0
    calls: int = 0
    wrong: int = 0
    late: int = 0
    blocks_hit: int = 0
    faults: int = 0

    def add(self, other: FaultReport) -> None:
        for name in ("cases", "calls", "wrong", "late", "blocks_hit", "faults"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def schedules(*, seeds: int, first_seed: int = 0) -> Iterator[FaultSchedule]:
    """Every fault by itself, and all together, `seeds` times each."""
    kinds = [{fault: 0.1} for fault in Fault if fault is not Fault.NONE]
    for seed in range(first_seed, first_seed + seeds):
        for number, rates in enumerate([*kinds, MIXED]):
            yield FaultSchedule(seed=seed * 100 + number, rates=rates)


def check_faults(*, seeds: int, first_seed: int = 0) -> FaultReport:
    report = FaultReport()
    for schedule in schedules(seeds=seeds, first_seed=first_seed):
        report.add(check_schedule(schedule))
    return report


def check_schedule(schedule: FaultSchedule, *, rounds: int = ROUNDS) -> FaultReport:
    """One case."""
    case = _Case(schedule)
    try:
        for _ in range(rounds):
            case.play()
    finally:
        case.close()
    return case.report


def content_of(key: BlockKey) -> bytes:
    """What block `key` holds, whoever computes it."""
    return Random(key.hash).randbytes(LAYOUT.payload_bytes)


class _Case:
    def __init__(self, schedule: FaultSchedule) -> None:
        self.report = FaultReport(cases=1)
        self._clock = VirtualClock()
        self._transport = FaultyTransport(schedule, self._clock)
        self._draw = Random(schedule.seed + 1)
        settings = StoreSettings(mac_key=MAC_KEY if schedule.seed % 2 else None, missing_life_s=0.1)
        self._clients = [
            KvClient(
                settings,
                namespace=NAMESPACE,
                layout=LAYOUT,
                incarnation=Incarnation(number),
                clock=self._clock,
                transport=self._transport,
            )
            for number in (1, 2)
        ]
        self._chains = [_chain(20 + 7 * number, salt=bytes([number])) for number in range(3)]

    def play(self) -> None:
        client, keys = self._draw.choice(self._clients), self._draw.choice(self._chains)
        keys = keys[: self._draw.randint(1, len(keys))]
        exact = self._draw.random() < 0.7
        act = self._draw.choice((self._put, self._fetch, self._fetch, self._lookup, self._snapshot))
        deadline = Deadline.after(self._draw.choice((0.02, 0.2, 1.0)), self._clock)
        act(client, keys, exact, deadline)
        self.report.calls += 1
        self.report.late += self._clock.now_s > deadline.at_s + LATE_S
        self._clock.now_s += self._draw.choice((0.0, 0.01, 0.2))
        self.report.faults = self._transport.place.corrupt

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _put(self, client: KvClient, keys: list[BlockKey], exact: bool, deadline: Deadline) -> None:
        blocks = [BlockToPut(key, content_of(key), exact=exact) for key in keys]
        self.report.wrong += not 0 <= client.put_blocks(blocks, deadline=deadline) <= len(keys)

    def _lookup(self, client: KvClient, keys: list[BlockKey], exact: bool, deadline: Deadline) -> None:  # noqa: ARG002
        self.report.wrong += not 0 <= client.lookup(keys, deadline=deadline) <= len(keys)

    def _fetch(self, client: KvClient, keys: list[BlockKey], exact: bool, deadline: Deadline) -> None:
        buffers = [memoryview(bytearray(LAYOUT.payload_bytes)) for _ in keys]
        fetched = client.fetch_blocks(keys, buffers, deadline=deadline, exact_only=exact)
        right = [bytes(buffer) == content_of(key) for key, buffer in zip(keys, buffers, strict=True)]
        self.report.wrong += not all(right[: fetched.count]) or (exact and not all(fetched.exact))
        self.report.blocks_hit += fetched.count

    def _snapshot(self, client: KvClient, keys: list[BlockKey], exact: bool, deadline: Deadline) -> None:  # noqa: ARG002
        content = content_of(keys[-1])
        key = handoff_snapshot_key(RequestId(keys[-1].hash[:16]), len(keys))
        value = SnapshotValue(boundary_tokens=len(keys), mode=1, parts={PartKind.WINDOW_ROWS: content})
        client.put_snapshot(key, value, ttl_s=60, deadline=deadline)
        found = client.get_snapshot(key, deadline=deadline, unlink=True)
        self.report.wrong += found is not None and bytes(found.parts[PartKind.WINDOW_ROWS]) != content


def _chain(blocks: int, *, salt: bytes) -> list[BlockKey]:
    root = chain_root(NAMESPACE, salt=salt)
    hashes = derive_block_hashes(range(blocks * BLOCK_TOKENS), root=root, block_tokens=BLOCK_TOKENS)
    return block_keys(hashes, root=root)
