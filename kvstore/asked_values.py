"""The first values of a batch, asked for before the rest of it is prepared.

RedisTransport.ask ──▶ AskedOver ──▶ `lease_for` the batch that begins with them: its connection, replies on their way
                            └──────▶ `drop`: read and forgotten
"""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.core.clock import Deadline

from .pipeline import skip_value
from .redis_shard import Lane, Lease, Shard
from .resp import RespConnection
from .transport import Place


class AskedOver:
    """The first values of a batch, asked for over a connection. For one thread at a time."""

    def __init__(self, shard: Shard, lease: Lease, keys: Sequence[bytes]) -> None:
        self.count = len(keys)
        self._shard = shard
        self._lease: Lease | None = lease
        self._keys = list(keys)

    def lease_for(self, place: Place, keys: Sequence[bytes], *, deadline: Deadline) -> Lease | None:
        """The connection is the caller's, if the batch begins with these keys and has more; else nobody holds it any
        longer."""
        if place is not self._shard or len(keys) <= self.count or list(keys[: self.count]) != self._keys:
            self.drop(deadline=deadline)
        lease, self._lease = self._lease, None
        return lease

    def drop(self, *, deadline: Deadline) -> None:
        """What has been asked for is read, and forgotten."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._shard.exchange(Lane.DATA, self._skip, deadline=deadline, lease=lease)

    def _skip(self, connections: Sequence[RespConnection], deadline: Deadline) -> None:
        for _ in range(self.count):
            skip_value(connections[0], deadline)
