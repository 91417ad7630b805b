"""Tenants of a router of several processes: their buckets, and how many requests each process has of each."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Final

from .joint_memory import JointMemory
from .joint_records import KEY_BYTES, KeyedRecords
from .tenant_limits import TENANTS_MAX, Bucket, Tenant

CHARGED_WITHIN_S: Final = 0.05
"""Tokens of answers come by the thousand a second: they are written together, so much later at most."""

_BUCKETS: Final = struct.Struct("=4d")
_COUNT: Final = struct.Struct("=Ii")
"""A process's requests, and in which of its runs they were counted."""


class JointTenants:
    """For one event loop."""

    def __init__(self, memory: JointMemory) -> None:
        self._memory = memory
        self._clock = memory.clock
        self._lock = memory.new_lock()
        self._counts = struct.Struct("=" + "Ii" * memory.processes)
        size = _BUCKETS.size + self._counts.size
        self._records = KeyedRecords(memory, records=TENANTS_MAX, record_bytes=size)
        self._charges: Counter[tuple[str, int]] = Counter()

    @contextmanager
    def opened(self, name: str) -> Generator[Tenant]:
        """As of `Tenants`: nobody else has it meanwhile. An error leaves it as it was."""
        key = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()
        with self._lock:
            at, is_new = self._records.put(key, now_s=self._clock.monotonic_s(), in_use=self._has_requests)
            if is_new:
                self._memory.bytes[at : at + _BUCKETS.size + self._counts.size] = bytes(
                    _BUCKETS.size + self._counts.size
                )
            bytes_ = self._memory.bytes
            requests_used, requests_at_s, tokens_used, tokens_at_s = _BUCKETS.unpack_from(bytes_, at)
            here, elsewhere = self._count(at + _BUCKETS.size)
            tenant = Tenant(Bucket(requests_used, requests_at_s), Bucket(tokens_used, tokens_at_s), here + elsewhere)
            yield tenant
            _BUCKETS.pack_into(
                bytes_, at, tenant.requests.used, tenant.requests.at_s, tenant.tokens.used, tenant.tokens.at_s
            )
            here = max(0, tenant.concurrent - elsewhere)  # one that was forgotten had none
            _COUNT.pack_into(bytes_, at + _BUCKETS.size + _COUNT.size * self._memory.process, self._memory.run, here)

    def charge_tokens(self, name: str, tokens: int, per_minute: int) -> None:
        if not self._charges:
            asyncio.get_running_loop().call_later(CHARGED_WITHIN_S, self.write_charges)
        self._charges[name, per_minute] += tokens

    def write_charges(self) -> None:
        """Those that have come since the last time."""
        charges, self._charges = self._charges, Counter()
        for (name, per_minute), tokens in charges.items():
            with self.opened(name) as tenant:
                tenant.tokens.take(tokens, per_minute, self._clock.monotonic_s())

    def _has_requests(self, at: int) -> bool:
        return any(self._count(at + _BUCKETS.size))

    def _count(self, at: int) -> tuple[int, int]:
        """Requests here and in the other processes; what the dead had is not counted."""
        here = elsewhere = 0
        counts = self._counts.unpack_from(self._memory.bytes, at)
        for process in range(self._memory.processes):
            run, count = counts[2 * process], counts[2 * process + 1]
            if not count or run != self._memory.run_of(process):
                continue
            if process == self._memory.process:
                here = count
            else:
                elsewhere += count
        return here, elsewhere
