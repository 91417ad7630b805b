"""Asks a rank whose registration is in doubt who it is: an address may have passed to another one.

address ── RankService.Describe ──▶ SignedRegistration, verified ──▶ what the rank says of itself now
"""

from __future__ import annotations

from typing import Any

import grpc

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError
from whalepod.rpc.rank.v1 import rank_pb2, rank_pb2_grpc

from .channels import Channels
from .liveness import PROBE_TIMEOUT_S, Liveness
from .peer_tls import PeerTls
from .registration import RankInfo, open_registration


class RankProber:
    """One channel for each address. For one event loop."""

    def __init__(self, *, secret: ClusterSecret, tls: PeerTls | None = None, clock: Clock) -> None:
        self._secret = secret
        self._clock = clock
        self._channels = Channels(tls)

    async def probe(self, rank: RankInfo) -> RankInfo | Liveness:
        """What the rank of this name says of itself at its address, perhaps as another incarnation or as one that
        drains; or why it is not to be used."""
        stub: Any = rank_pb2_grpc.RankServiceStub(self._channels.to(rank.address))
        try:
            answer = await stub.Describe(rank_pb2.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return Liveness.SILENT if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else Liveness.UNREACHABLE
        try:
            data = answer.registration.SerializeToString()
            now = open_registration(data, self._secret, now_unix_ms=self._clock.unix_ms())
        except AuthenticationError:
            return Liveness.UNREACHABLE
        if now.rank_id != rank.rank_id:
            return Liveness.UNREACHABLE
        return now

    async def close(self) -> None:
        await self._channels.close()
