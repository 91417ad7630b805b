"""Calls of `PrefillService.Run`: one channel for each prefill rank, one call for each remote prefill."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import grpc

from whalepod.cluster.channels import Channels
from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.peer_tls import Dialler
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.wire import load_from_proto
from whalepod.core.clock import Deadline
from whalepod.core.errors import DrainingError, WorkerLostError
from whalepod.core.ids import Incarnation
from whalepod.engine.interface import RankLoad
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc

LinkKey = tuple[str, Incarnation]


def link_key(rank: RankInfo) -> LinkKey:
    """A restarted rank gets a channel of its own: the old one may still be pausing before it connects again."""
    return rank.address, rank.incarnation


class PrefillClient:
    """For one event loop."""

    def __init__(
        self,
        *,
        on_load: Callable[[RankInfo, RankLoad], None],
        on_lost: Callable[[RankInfo], None],
        on_draining: Callable[[RankInfo], None],
        tls: Dialler | None = None,
    ) -> None:
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._channels = Channels(tls)

    async def run(
        self, rank: RankInfo, ticket: common_pb2.SignedTicket, *, deadline: Deadline
    ) -> prefill_pb2.RunResponse:
        """The rank's READY. Cancelling this cancels the work there. Raises the ServingError the rank answered with, or
        WorkerLostError if it did not answer."""
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(self._channels.to(rank.address, key=link_key(rank)))
        try:
            request = prefill_pb2.RunRequest()
            request.ticket.ticket, request.ticket.mac = ticket.ticket, ticket.mac
            response = await stub.Run(request, timeout=deadline.remaining_s())
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            if isinstance(error, WorkerLostError):
                self._on_lost(rank)
            elif isinstance(error, DrainingError):
                self._on_draining(rank)
            raise error from failure
        assert isinstance(response, prefill_pb2.RunResponse)
        self._on_load(rank, load_from_proto(response.load))
        return response

    def close_links(self, *, keep: Collection[LinkKey]) -> None:
        """Close the channels to ranks that are not in `keep`, each once no call is using it."""
        self._channels.close_all_but(keep)

    async def close(self) -> None:
        await self._channels.close()
