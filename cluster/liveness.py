"""Whether a gRPC server says that it serves, asked by the standard health protocol."""

from __future__ import annotations

from enum import Enum, auto

import grpc
from grpc_health.v1 import health_pb2

from .channels import Channels
from .peer_tls import PeerTls

PROBE_TIMEOUT_S = 1.0


class Liveness(Enum):
    SERVING = auto()
    NOT_SERVING = auto()  # it answers, and says that it does not serve: starting or draining
    UNREACHABLE = auto()  # nobody listens there
    SILENT = auto()  # no answer in time: dead, cut off, or very busy


class HealthProber:
    """Probes addresses, with one channel each. For one event loop."""

    def __init__(self, *, timeout_s: float = PROBE_TIMEOUT_S, tls: PeerTls | None = None) -> None:
        self._timeout_s = timeout_s
        self._channels = Channels(tls)

    async def probe(self, address: str) -> Liveness:
        try:
            check = self._channels.to(address).unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            reply = await check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return Liveness.SILENT if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else Liveness.UNREACHABLE
        return Liveness.SERVING if reply.status == health_pb2.HealthCheckResponse.SERVING else Liveness.NOT_SERVING

    async def close(self) -> None:
        await self._channels.close()
