"""Calls of `PrefillService.Run`: one channel for each prefill rank, one call for each remote prefill."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import grpc

from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.grpc_options import channel_options
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


@dataclass(slots=True)
class _Link:
    channel: grpc.aio.Channel
    calls: int = 0


class PrefillClient:
    """For one event loop."""

    def __init__(
        self,
        *,
        on_load: Callable[[RankInfo, RankLoad], None],
        on_lost: Callable[[RankInfo], None],
        on_draining: Callable[[RankInfo], None],
    ) -> None:
        self._on_load = on_load
        self._on_lost = on_lost
        self._on_draining = on_draining
        self._links: dict[LinkKey, _Link] = {}

    async def run(
        self, rank: RankInfo, ticket: common_pb2.SignedTicket, *, deadline: Deadline
    ) -> prefill_pb2.RunResponse:
        """The rank's READY. Cancelling this cancels the work there. Raises the ServingError the rank answered with, or
        WorkerLostError if it did not answer."""
        link = self._links.get(link_key(rank))
        if link is None:
            channel = grpc.aio.insecure_channel(rank.address, options=channel_options())
            link = self._links[link_key(rank)] = _Link(channel)
        stub: Any = prefill_pb2_grpc.PrefillServiceStub(link.channel)
        link.calls += 1
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
        finally:
            link.calls -= 1
        assert isinstance(response, prefill_pb2.RunResponse)
        self._on_load(rank, load_from_proto(response.load))
        return response

    async def close_idle_links(self, *, keep: Collection[LinkKey]) -> None:
        """Close the channels to ranks that are not in `keep` and that no call is using."""
        gone = [key for key, link in self._links.items() if key not in keep and link.calls == 0]
        await asyncio.gather(*(self._links.pop(key).channel.close() for key in gone))

    async def close(self) -> None:
        links, self._links = self._links, {}
        await asyncio.gather(*(link.channel.close() for link in links.values()))
