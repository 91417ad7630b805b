"""What a rank of a context-parallel group does that is not its head: it computes its rows of every segment, keeps what
came of all rows in caches that are numbered as the head's are, and stores the blocks that are its own. Nobody else uses
the caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.engine.expert_parallel.transport import Transport
from whalepod.engine.state_image import StateImage
from whalepod.engine.transfers import BlockWrite, Transfers
from whalepod.kernels.numerics import whole_batches
from whalepod.kvstore.client import BlockToPut
from whalepod.model.caches import Caches
from whalepod.model.network import Network

from .loop import ContextLoop
from .orders import EntrustedBlock, receive_order
from .rows import TransportRows


class Follower:
    def __init__(
        self,
        network: Network,
        caches: Caches,
        image: StateImage,
        transfers: Transfers | None,
        loop: ContextLoop,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`image` of `caches`."""
        self._network = network
        self._caches = caches
        self._image = image
        self._transfers = transfers
        self._loop = loop
        self._clock = clock

    def follow(self, transport: Transport) -> None:
        """Take part in the segment that the head orders next. Raises GroupBrokenError."""
        order = receive_order(transport, self._caches)
        with whole_batches(order.whole_batches):
            self._network.compute_shared(order.segment, self._caches, TransportRows(transport))
        for block in order.entrusted:
            if block.rank == transport.rank:
                self._store(block, partial(self._loop.tell_head, self._loop.epoch, block.number))

    def _store(self, block: EntrustedBlock, tell: Callable[[bool], None]) -> None:
        """Copy it now, before another segment writes to where it is, and queue it."""
        transfers, size = self._transfers, self._image.block_layout.payload_bytes
        if transfers is None or not transfers.has_room_for_entrusted(size):
            tell(False)
            return
        value = self._image.export_block(block.block).made(
            lambda payload: BlockToPut(block.key, payload, exact=block.exact, owner=block.owner)
        )
        transfers.write(BlockWrite(value, size, None, Deadline.after(block.life_s, self._clock), tell))
