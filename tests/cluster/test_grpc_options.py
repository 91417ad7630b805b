"""A stream that says nothing for long is kept alive by pings, and not broken off because of them."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from whalepod.cluster.grpc_options import channel_options, server_options

SILENT_S = 55.0
"""Five pings: a server with gRPC's own limits breaks off after the third, and no channel pings faster."""


@pytest.mark.slow
async def test_a_silent_stream_outlives_many_pings() -> None:
    servicer = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
    server = grpc.aio.server(options=server_options())
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )(health_pb2.HealthCheckRequest())
        await watch.read()
        await asyncio.sleep(SILENT_S)
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        reply = await asyncio.wait_for(watch.read(), 5)
        assert isinstance(reply, health_pb2.HealthCheckResponse)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    await server.stop(None)
