"""A transport that knows how long its rank waits for the others: which rank is slow, and whether one hangs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from whalepod.core.clock import Clock

from .peer_memory import PeerMemory
from .transport import Transport


class TimedTransport:
    """Adds up how long its owner waits in it, and knows since when it has not."""

    def __init__(self, inner: Transport, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self.rank = inner.rank
        self.size = inner.size
        self.waited_s = 0.0
        self.computing_since_s: float | None = None
        self.broken = False

    def exchange(self, sent: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> Tensor:
        started_s, self.computing_since_s = self._clock.monotonic_s(), None
        received = self._inner.exchange(sent, sent_bytes, received_bytes)
        self.computing_since_s = self._clock.monotonic_s()
        self.waited_s += self.computing_since_s - started_s
        return received

    def gather(self, values: Tensor) -> Tensor:
        return self._inner.gather(values)

    def share_memory(self, bytes_each: int) -> PeerMemory | None:
        return self._inner.share_memory(bytes_each)

    def settle(self) -> None:
        started_s, self.computing_since_s = self._clock.monotonic_s(), None
        self._inner.settle()
        self.waited_s += self._clock.monotonic_s() - started_s

    def close(self) -> None:
        self.broken = True
        self._inner.close()
