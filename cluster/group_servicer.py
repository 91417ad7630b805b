"""`GroupService`: what the ranks of a pool ask each other. Translates and calls `GroupMembership`."""

from __future__ import annotations

from typing import Any

import grpc

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError
from whalepod.rpc.group.v1 import group_pb2, group_pb2_grpc

from .error_codes import status_of_error
from .group_membership import GroupMembership
from .group_messages import verify_or_raise

Context = grpc.aio.ServicerContext[Any, Any]


class GroupServicer(group_pb2_grpc.GroupServiceServicer):
    """Everything runs on the rank's event loop."""

    name = group_pb2.DESCRIPTOR.services_by_name["GroupService"].full_name

    def __init__(self, membership: GroupMembership, *, secret: ClusterSecret, clock: Clock) -> None:
        self._membership = membership
        self._secret = secret
        self._clock = clock

    def register(self, server: grpc.aio.Server) -> None:
        group_pb2_grpc.add_GroupServiceServicer_to_server(self, server)

    async def Probe(self, request: group_pb2.ProbeRequest, context: Context) -> group_pb2.ProbeResponse:  # noqa: N802
        await self._verify(request, context)
        return self._membership.describe(request.index)

    async def Join(self, request: group_pb2.JoinRequest, context: Context) -> group_pb2.JoinResponse:  # noqa: N802
        await self._verify(request, context)
        if not 0 <= request.index < self._membership.size:
            size = self._membership.size
            text = f"rank {request.index} is none of a pool of {size}: start all with the same `replicas`"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        return await self._membership.joining(request)

    async def Wake(self, request: group_pb2.WakeRequest, context: Context) -> group_pb2.WakeResponse:  # noqa: N802
        await self._verify(request, context)
        self._membership.woken(request.epoch, request.round)
        return group_pb2.WakeResponse()

    async def Stored(self, request: group_pb2.StoredRequest, context: Context) -> group_pb2.StoredResponse:  # noqa: N802
        await self._verify(request, context)
        self._membership.was_stored(request)
        return group_pb2.StoredResponse()

    async def _verify(self, request: Any, context: Context) -> None:  # noqa: ANN401  any of the four
        try:
            verify_or_raise(request, self._secret, self._clock)
        except AuthenticationError as error:
            status, text, metadata = status_of_error(error)
            await context.abort(status, text, metadata)
