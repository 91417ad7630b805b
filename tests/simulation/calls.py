"""gRPC calls over the simulated network: what stubs ask of a channel, and what servicers ask of a server's context.

Messages are encoded and decoded, deadlines travel, a cancelled call cancels its handler, and who writes faster than the
other side reads has to wait, as with the real one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from tests.simulation.network import CONNECT_S, Lane, Network, Node

UNREAD_MAX = 32
"""Messages that a stream holds for a reader who is behind."""

CANCEL_S = (0.0001, 0.001)
"""Between the end of a broken call's requests and the cancellation of its handler."""
END_READ_RATE = 0.8

END = object()


class Messages:
    """One direction of a call at the side that reads it."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._news: asyncio.Future[None] | None = None

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def clear(self) -> None:
        self._items.clear()

    async def get(self) -> Any:
        while not self._items:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._items.popleft()


class Call:
    """Both ends of one call. Each end knows only what has reached it."""

    def __init__(
        self,
        network: Network,
        client: Node,
        server: Node,
        method: str,
        *,
        timeout_s: float | None,
        metadata: Any,
    ) -> None:
        self.network, self.client, self.server, self.method = network, client, server, method
        self.metadata = tuple(metadata or ())
        self.deadline_s = None if timeout_s is None else network.loop.time() + timeout_s
        self.responses, self.requests = Messages(), Messages()
        self.ended: grpc.aio.AioRpcError | bool = False
        """As the client knows it; True: well."""
        self._up, self._down = Lane(client, server), Lane(server, client)
        self._task: asyncio.Task[None] | None = None
        self._unread = 0
        self._room: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._alarm = network.loop.call_later(timeout_s, self._run_out)

    # The client's end.

    def open(self) -> None:
        self.network.opened(self)
        self.network.carry(self._up, self._accept)

    def send_up(self, data: bytes | object) -> None:
        self.network.carry(self._up, lambda: self.requests.put(data))

    def cancel(self) -> None:
        if not self.ended:
            self._fail(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
            self.network.carry(self._up, self.break_at_server)

    def read_one(self) -> None:
        """The client has taken a message."""
        self._unread -= 1
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def break_at_client(self, detail: str) -> None:
        self._fail(grpc.StatusCode.UNAVAILABLE, detail)

    def _run_out(self) -> None:
        if not self.ended:
            self._fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self.network.carry(self._up, self.break_at_server)

    def _fail(self, code: grpc.StatusCode, detail: str, trailing: Any = ()) -> None:
        if not self.ended:
            empty = grpc.aio.Metadata()
            self._end(grpc.aio.AioRpcError(code, empty, grpc.aio.Metadata(*trailing), detail))

    def _end(self, how: grpc.aio.AioRpcError | bool) -> None:
        if self.ended:
            return
        self.ended = how
        self.network.closed(self)
        if self._alarm is not None:
            self._alarm.cancel()
        if how is not True:  # what was not read is not read any more
            self.responses.clear()
        self.responses.put(END if how is True else how)

    # The server's end.

    def break_at_server(self) -> None:
        """The client is gone, as far as the server knows: mostly it reads the end of the requests before it is
        cancelled."""
        self.network.closed(self)
        if self._task is not None:
            if self.network.draw.random() < END_READ_RATE:
                self.requests.put(END)
            self.network.loop.call_later(self.network.draw.uniform(*CANCEL_S), self._task.cancel)

    def _accept(self) -> None:
        if self.deadline_s is not None and self.network.loop.time() >= self.deadline_s:
            return
        self._task = self.network.loop.create_task(self._serve(), name=f"{self.server.address}{self.method}")
        self.server.tasks[self._task] = None
        self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        del self.server.tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.network.loop.call_exception_handler({"message": f"{self.method} raised", "exception": error})

    async def _serve(self) -> None:
        handler: Any = self.server.handlers[self.method]
        context = Context(self)
        try:
            async with asyncio.timeout_at(self.deadline_s):
                request = self._read_requests(handler) if handler.request_streaming else await self._one(handler)
                run: Any = _behaviour(handler)
                if handler.response_streaming:
                    async for response in run(request, context):
                        await self._send_down(handler.response_serializer(response))
                else:
                    await self._send_down(handler.response_serializer(await run(request, context)))
        except grpc.aio.AbortError:
            assert context.status is not None
            status = context.status
            self.network.carry(self._down, lambda: self._fail(*status))
        except TimeoutError:
            return  # the client's own clock says it too
        else:
            self.network.carry(self._down, lambda: self._end(how=True))

    async def _one(self, handler: Any) -> Any:
        data = await self.requests.get()
        if data is END:
            raise asyncio.CancelledError
        return handler.request_deserializer(data)

    async def _read_requests(self, handler: Any) -> AsyncIterator[Any]:
        while (data := await self.requests.get()) is not END:
            yield handler.request_deserializer(data)

    async def _send_down(self, data: bytes) -> None:
        while self._unread >= UNREAD_MAX:
            self._room = self.network.loop.create_future()
            await self._room
        self._unread += 1
        self.network.carry(self._down, lambda: self._receive(data))

    def _receive(self, data: bytes) -> None:
        if not self.ended:
            self.responses.put(data)


def _behaviour(handler: Any) -> Callable[..., Any]:
    kinds = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(kind for kind in kinds if kind is not None)


class Context:
    """What a servicer is given."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.status: tuple[grpc.StatusCode, str, Any] | None = None

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.status = code, details, trailing_metadata
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    async def send_initial_metadata(self, metadata: object) -> None:
        """No client here reads them."""

    def time_remaining(self) -> float | None:
        deadline_s = self._call.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - self._call.network.loop.time())


@dataclass(frozen=True, slots=True)
class Dialler:
    """How one process reaches others (`cluster/peer_tls.py`)."""

    network: Network
    node: Node
    version: object = None

    def channel(self, address: str) -> Any:
        return Channel(self.network, self.node, address)


class Channel:
    """To whoever listens at an address when a call is made."""

    def __init__(self, network: Network, node: Node, address: str) -> None:
        self._network, self._node, self._address = network, node, address
        self._open: dict[ClientCall, None] = {}

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Calls end, or have so long to end."""
        if grace and self._open:
            await asyncio.wait([call.over for call in self._open], timeout=grace)
        for call in list(self._open):
            call.cancel()

    def get_state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.READY

    def unary_unary(self, method: str, **coding: Any) -> Callable[..., ClientCall]:
        return self._caller(method, streams_up=False, **coding)

    def unary_stream(self, method: str, **coding: Any) -> Callable[..., ClientCall]:
        return self._caller(method, streams_up=False, **coding)

    def stream_stream(self, method: str, **coding: Any) -> Callable[..., ClientCall]:
        return self._caller(method, streams_up=True, **coding)

    def _caller(
        self,
        method: str,
        *,
        streams_up: bool,
        request_serializer: Any,
        response_deserializer: Any,
        **_registered: object,
    ) -> Callable[..., ClientCall]:
        def call(
            request: Any = None,
            timeout: float | None = None,
            metadata: Any = None,
        ) -> ClientCall:
            opened = self._opened(method, timeout, metadata)
            if not streams_up:
                data = request_serializer(request)
                opened.send_up(data)
                self._perhaps_repeated(method, data, timeout, metadata)
            client_call = ClientCall(opened, request_serializer, response_deserializer)
            self._open[client_call] = None
            client_call.over.add_done_callback(lambda _: self._open.pop(client_call))
            return client_call

        return call

    def _opened(self, method: str, timeout_s: float | None, metadata: Any) -> Call:
        network, server = self._network, self._network.find(self._address)
        target = server or Node(self._address, alive=False)
        call = Call(network, self._node, target, method, timeout_s=timeout_s, metadata=metadata)
        if not method.endswith("/Describe"):  # again and again
            network.journal.note("call", self._node.address, self._address, method)
        if network.is_silent(self._node.address, self._address):
            network.loop.call_later(CONNECT_S, self._give_up_connecting, call)
        elif server is None or not self._node.alive:
            network.loop.call_later(network.latency_s(), call.break_at_client, "failed to connect")
        call.open()
        return call

    def _give_up_connecting(self, call: Call) -> None:
        if self._network.is_silent(self._node.address, self._address):
            call.break_at_client("failed to connect in time")

    def _perhaps_repeated(self, method: str, data: bytes, timeout_s: float | None, metadata: Any) -> None:
        """A proxy between them makes the call once more. Nobody hears the answer."""
        network = self._network
        if network.draw.random() < network.weather.repeat_rate:

            def again() -> None:
                network.journal.seen["repeats"] += 1
                network.journal.note("repeats", self._node.address, self._address, method)
                self._opened(method, timeout_s, metadata).send_up(data)

            network.loop.call_later(network.draw.uniform(0, network.weather.repeat_s), again)


class ClientCall:
    """What a stub returns: awaited, iterated, written to."""

    def __init__(self, call: Call, to: Any, back: Any) -> None:
        self._call, self._to, self._back = call, to, back
        self.over: asyncio.Future[None] = call.network.loop.create_future()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (data := await self._next()) is not END:
            yield self._back(data)

    async def write(self, message: Any) -> None:
        if isinstance(self._call.ended, grpc.aio.AioRpcError):
            raise self._call.ended
        self._call.send_up(self._to(message))

    async def done_writing(self) -> None:
        self._call.send_up(END)

    def cancel(self) -> None:
        self._call.cancel()
        self._note_over()

    async def _only(self) -> Any:
        data = await self._next()
        assert data is not END, "a unary call has one response"
        await self._next()
        return self._back(data)

    async def _next(self) -> Any:
        """Bytes or END. Raises AioRpcError; whoever is cancelled while he waits here has cancelled the call."""
        try:
            data = await self._call.responses.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if data is END or isinstance(data, grpc.aio.AioRpcError):
            self._note_over()
        if isinstance(data, grpc.aio.AioRpcError):
            raise data
        if data is not END:
            self._call.read_one()
        return data

    def _note_over(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
