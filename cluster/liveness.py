"""Whether a gRPC server says that it serves, asked by the standard health protocol."""

from __future__ import annotations

from enum import Enum, auto

import grpc
from grpc_health.v1 import health_pb2

from .grpc_options import channel_options

PROBE_TIMEOUT_S = 1.0


class Liveness(Enum):
    SERVING = auto()
    NOT_SERVING = auto()  # it answers, and says that it does not serve: starting or draining
    UNREACHABLE = auto()  # nobody listens there
    SILENT = auto()  # no answer in time: dead, cut off, or very busy


class HealthProber:
    """Probes addresses, with one channel each. For one event loop."""

    def __init__(self, *, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def probe(self, address: str) -> Liveness:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = grpc.aio.insecure_channel(address, options=channel_options())
        try:
            check = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            reply = await check(health_pb2.HealthCheckRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return Liveness.SILENT if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else Liveness.UNREACHABLE
        return Liveness.SERVING if reply.status == health_pb2.HealthCheckResponse.SERVING else Liveness.NOT_SERVING

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
