"""Ranks at addresses that a router was given: no registry is needed to find them.

    address ── RankService.Describe, again twice a second ──▶ SignedRegistration, verified ──▶ table of the router

A rank is usable while it describes itself; a link that breaks takes it out until it does so again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import grpc

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError
from whalepod.core.ids import Incarnation, RankId
from whalepod.core.tasks import cancel_and_wait
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.rank.v1 import rank_pb2, rank_pb2_grpc

from .channels import Channels
from .peer_tls import Dialler
from .registration import RankInfo, open_registration, sign_registration

log = logging.getLogger(__name__)

POLL_S = 0.5
PROBE_TIMEOUT_S = 1.0
SILENT_POLLS_MAX = 4
"""Polls in a row without an answer in time after which a rank is dropped. One that refuses is dropped at once."""


class RankServicer(rank_pb2_grpc.RankServiceServicer):
    """A rank's side."""

    def __init__(self, describe: Callable[[], RankInfo], *, secret: ClusterSecret) -> None:
        self._describe = describe
        self._secret = secret

    def register(self, server: grpc.aio.Server) -> None:
        rank_pb2_grpc.add_RankServiceServicer_to_server(self, server)

    async def Describe(  # noqa: N802  the RPC's name
        self,
        request: rank_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext[rank_pb2.DescribeRequest, rank_pb2.DescribeResponse],
    ) -> rank_pb2.DescribeResponse:
        del request, context
        signed = common_pb2.SignedRegistration.FromString(sign_registration(self._describe(), self._secret))
        return rank_pb2.DescribeResponse(registration=signed)


class StaticRanks:
    """A router's table of ranks at fixed addresses, `host:port` each. For one event loop."""

    def __init__(
        self,
        addresses: Collection[str],
        *,
        secret: ClusterSecret,
        on_change: Callable[[Mapping[RankId, RankInfo]], None],
        tls: Dialler | None = None,
        clock: Clock = SYSTEM_CLOCK,
        poll_s: float = POLL_S,
    ) -> None:
        self._addresses = tuple(addresses)
        self._secret = secret
        self._on_change = on_change
        self._clock = clock
        self._poll_s = poll_s
        self._channels = Channels(tls)
        self._known: dict[str, RankInfo] = {}
        self._silent: dict[str, int] = {}
        self._unheard = set(self._addresses)
        """Those that have neither answered nor refused since the start, nor been silent for long."""
        self._refused: dict[str, str] = {}
        self._ranks: Mapping[RankId, RankInfo] = MappingProxyType({})
        self._task: asyncio.Task[None] | None = None

    @property
    def ranks(self) -> Mapping[RankId, RankInfo]:
        """Ranks that can be used now. Replaced, never changed in place."""
        return self._ranks

    @property
    def settled(self) -> bool:
        """Whether each address has been heard from, or given up: more ranks are not to be expected."""
        return not self._unheard

    def report_lost(self, rank_id: RankId, incarnation: Incarnation) -> None:
        """A link to the rank broke. It is out of the table until it describes itself again."""
        for address, info in list(self._known.items()):
            if (info.rank_id, info.incarnation) == (rank_id, incarnation):
                del self._known[address]
        self._publish()

    async def start(self) -> None:
        """Returns after the first round."""
        await self.poll()
        self._task = asyncio.create_task(self._poll_forever(), name="static-ranks")

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        await self._channels.close()

    async def add(self, address: str) -> None:
        """One more address, asked at once. One that is known already is only asked."""
        if address not in self._addresses:
            self._addresses = (*self._addresses, address)
        await self.poll()

    async def poll(self) -> None:
        """Ask every address once, all at a time, and take the answers in the order of the addresses."""
        addresses = self._addresses
        answers = await asyncio.gather(*map(self._ask, addresses))
        for address, info in zip(addresses, answers, strict=True):
            if info is not None:
                self._take(address, info)
        self._publish()

    async def _ask(self, address: str) -> RankInfo | None:
        stub: Any = rank_pb2_grpc.RankServiceStub(self._channels.to(address))
        try:
            response = await stub.Describe(rank_pb2.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
            data = response.registration.SerializeToString()
            info = open_registration(data, self._secret, now_unix_ms=self._clock.unix_ms())
        except grpc.aio.AioRpcError as failure:
            silent = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self._silent[address] = self._silent.get(address, 0) + 1
            if not silent or self._silent[address] >= SILENT_POLLS_MAX:
                self._known.pop(address, None)
                self._unheard.discard(address)
            self._note_handshake(address, failure)
            return None
        except AuthenticationError as error:
            self._refuse(address, str(error))
            return None
        self._silent.pop(address, None)
        self._unheard.discard(address)
        return replace(info, address=address)

    def _take(self, address: str, info: RankInfo) -> None:
        """All ranks must fit together: the first of the addresses that answers decides."""
        first = next((self._known[other] for other in self._addresses if other in self._known), info)
        reason = info.incompatibility(model=first.model, namespace=first.namespace, layout=first.layout)
        namesake = any(other.rank_id == info.rank_id for at, other in self._known.items() if at != address)
        if reason is None and namesake:
            reason = f"another address is {info.rank_id} too"
        if reason is None:
            self._refused.pop(address, None)
            self._known[address] = info
        else:
            self._refuse(address, reason)

    def _refuse(self, address: str, reason: str) -> None:
        self._known.pop(address, None)
        self._unheard.discard(address)
        if self._refused.get(address) != reason:
            log.error("refused the rank at %s: %s", address, reason)
        self._refused[address] = reason

    def _note_handshake(self, address: str, failure: grpc.aio.AioRpcError) -> None:
        """A rank that is not there yet is nothing to speak of; one that is not believed, or does not believe, is."""
        if "handshake" in (failure.details() or "").lower():
            self._refuse(address, f"{failure.details()} (see tls.peer_cert_file)")

    def _publish(self) -> None:
        ranks = {info.rank_id: info for info in self._known.values()}
        changed = _identities(ranks) != _identities(self._ranks)
        self._ranks = MappingProxyType(ranks)
        if changed:
            self._on_change(self._ranks)

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.poll()
            except Exception:  # the table must outlive a bad poll; the next one may succeed
                log.exception("asking the ranks failed")


def _identities(ranks: Mapping[RankId, RankInfo]) -> dict[RankId, tuple[str, int, bool]]:
    return {name: (info.address, info.incarnation, info.draining) for name, info in ranks.items()}
