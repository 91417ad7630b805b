"""The other ranks of a group, as one rank reaches them. For one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc

from whalepod.core.clock import Clock
from whalepod.core.credentials import ClusterSecret
from whalepod.rpc.group.v1 import group_pb2, group_pb2_grpc

from .channels import Channels
from .group_messages import Request, sign
from .peer_tls import PeerTls

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0
TELL_TIMEOUT_S = 2.0
TELL_ATTEMPTS = 3


class GroupPeers:
    def __init__(
        self,
        addresses: Sequence[str],
        *,
        index: int,
        secret: ClusterSecret,
        tls: PeerTls | None = None,
        clock: Clock,
    ) -> None:
        """`addresses` of every rank of the group, this one too, in order."""
        self.index = index
        self.size = len(addresses)
        self._secret = secret
        self._clock = clock
        self._addresses = addresses
        self._channels = Channels(tls)
        self._tasks: set[asyncio.Task[None]] = set()

    async def probe(self, peer: int, *, timeout_s: float = PROBE_TIMEOUT_S) -> group_pb2.ProbeResponse | None:
        """None: it does not answer."""
        request = sign(group_pb2.ProbeRequest(index=self.index), self._secret, self._clock)
        try:
            return await self._stub(peer).Probe(request, timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return None

    async def probe_all(self) -> Mapping[int, group_pb2.ProbeResponse]:
        """Those that answer and mean to stay."""
        others = [peer for peer in range(self.size) if peer != self.index]
        answers = await asyncio.gather(*(self.probe(peer) for peer in others))
        answered = ((peer, answer) for peer, answer in zip(others, answers, strict=True) if answer is not None)
        return {peer: answer for peer, answer in answered if not answer.leaving}

    async def join(self, peer: int, request: group_pb2.JoinRequest, *, timeout_s: float) -> group_pb2.Group | None:
        """The group that `peer` has decided; None: come again."""
        try:
            answer = await self._stub(peer).Join(sign(request, self._secret, self._clock), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            log.info("joining rank %d: %s", peer, error.details())
            return None
        return answer.group if answer.HasField("group") else None

    def wake(self, peers: Sequence[int], epoch: int, round_number: int) -> None:
        for peer in peers:
            self._run(self._wake(peer, epoch, round_number))

    def heard_from(self, peer: int) -> None:
        """It is there, whatever the channel to it remembers of its absence: groups would form without a rank that asks
        to join. Who is none of the group may look on, and changes nothing."""
        if 0 <= peer < self.size:
            self._channels.try_again(self._addresses[peer])

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channels.close()

    def _run(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tell_stored(self, peer: int, request: group_pb2.StoredRequest, on_failure: Callable[[], None]) -> None:
        """Never waits."""
        self._run(self._tell_stored(peer, request, on_failure))

    async def _wake(self, peer: int, epoch: int, round_number: int) -> None:
        request = group_pb2.WakeRequest(epoch=epoch, round=round_number)
        await self._tell(peer, "Wake", request)

    async def _tell_stored(self, peer: int, request: group_pb2.StoredRequest, on_failure: Callable[[], None]) -> None:
        if not await self._tell(peer, "Stored", request):
            on_failure()

    async def _tell(self, peer: int, call: str, request: Request) -> bool:
        """False: it could not be told."""
        for _ in range(TELL_ATTEMPTS):
            try:
                signed = sign(request, self._secret, self._clock)
                await getattr(self._stub(peer), call)(signed, timeout=TELL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.info("%s: rank %d was not told: %s", call, peer, error.details())
            else:
                return True
        return False

    def _stub(self, peer: int) -> Any:  # noqa: ANN401  generated stubs are untyped
        return group_pb2_grpc.GroupServiceStub(self._channels.to(self._addresses[peer]))
