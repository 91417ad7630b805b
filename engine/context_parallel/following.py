"""What a rank of a context-parallel group does that is not its head: it computes its rows of every segment, and keeps
what came of all rows in caches that are numbered as the head's are. Nobody else uses them."""

from __future__ import annotations

from whalepod.engine.expert_parallel.transport import Transport
from whalepod.kernels.numerics import whole_batches
from whalepod.model.caches import Caches
from whalepod.model.network import Network

from .orders import receive_order
from .rows import TransportRows


class Follower:
    def __init__(self, network: Network, caches: Caches) -> None:
        self._network = network
        self._caches = caches

    def follow(self, transport: Transport) -> None:
        """Take part in the segment that the head orders next. Raises GroupBrokenError."""
        order = receive_order(transport, self._caches)
        with whole_batches(order.whole_batches):
            self._network.compute_shared(order.segment, self._caches, TransportRows(transport))
