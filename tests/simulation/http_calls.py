"""HTTP over the simulated network: the router's own protocol at one end of a connection, a client's at the other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import h11

from tests.simulation.answers import Answer, End
from tests.simulation.calls import END, Messages
from tests.simulation.network import Lane, Network, Node
from tests.simulation.plans import Ask
from whalepod.engine.interface import FinishReason
from whalepod.services.router.tenancy import TENANT_HEADER

UNREAD_BYTES = (2048, 512)
"""A server that has written so much to a client who does not read is told to pause, and to go on when it is less."""
STATUSES = {
    "worker_lost": grpc.StatusCode.UNAVAILABLE,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "no_capacity": grpc.StatusCode.UNAVAILABLE,
    "rate_limit_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""What gRPC says for the code of an error. All others are for what we or the client have done wrong."""


class _NoSocket:
    """Who asks the system about a connection hears that it knows none."""

    def fileno(self) -> int:
        raise OSError

    def getpeername(self) -> tuple[str, int]:
        return "simulated", 0

    getsockname = getpeername


class Connection(asyncio.Transport):
    """The server's end is a transport; the client has `send`, `received` and `hang_up`."""

    def __init__(self, network: Network, client: Node, server: Node) -> None:
        super().__init__()
        self.client, self.server = client, server
        self.received = Messages()
        """Bytes, then END, or an error."""
        self._network = network
        self._up, self._down = Lane(client, server), Lane(server, client)
        assert server.accept is not None, "it serves HTTP"
        self._protocol: Any = server.accept()
        self._begun = self._closing = self._lost = self._paused = False
        self._unread_bytes = 0
        network.opened(self)
        network.carry(self._up, self._begin)

    def send(self, data: bytes) -> None:
        self._network.carry(self._up, lambda: None if self._lost else self._protocol.data_received(data))

    def hang_up(self) -> None:
        self._network.closed(self)
        self._network.carry(self._up, self.break_at_server)

    def note_read(self, size_bytes: int) -> None:
        self._unread_bytes -= size_bytes
        if self._paused and self._unread_bytes < UNREAD_BYTES[1] and not self._lost:
            self._paused = False
            self._network.loop.call_soon(self._protocol.resume_writing)

    def break_at_client(self, detail: str) -> None:
        self.received.put(ConnectionResetError(detail))

    def break_at_server(self) -> None:
        self._lose(ConnectionResetError("the client is gone"))

    # What a server asks of a transport.

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._lost or self._closing:
            return
        kept = bytes(data)
        self._unread_bytes += len(kept)
        self._network.carry(self._down, lambda: self.received.put(kept))
        if self._unread_bytes > UNREAD_BYTES[0] and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.carry(self._down, lambda: self.received.put(END))
            self._network.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.carry(self._down, lambda: self.break_at_client("aborted"))
            self._network.loop.call_soon(self._lose, None)

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def get_write_buffer_size(self) -> int:
        return self._unread_bytes if self._paused else 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _NoSocket() if name == "socket" else default

    def pause_reading(self) -> None:
        """What comes is small."""

    def resume_reading(self) -> None:
        """As above."""

    def _begin(self) -> None:
        if not self._lost:
            self._begun = True
            self._protocol.connection_made(self)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = True
        self._network.closed(self)
        if self._begun:
            self._protocol.connection_lost(error)


async def ask_over_http(ask: Ask, answer: Answer, network: Network, node: Node, address: str) -> None:
    """Fill `answer`, as a client of `/v1/completions`."""
    server = network.find(address)
    if server is None or network.is_silent(node.address, address):
        await asyncio.sleep(network.latency_s())
        answer.status, answer.detail = grpc.StatusCode.UNAVAILABLE, "failed to connect"
        return
    connection = Connection(network, node, server)
    try:
        connection.send(_request(ask))
        async for status, part in _Response(connection, reads_every_s=ask.reads_every_s):
            _note(answer, status, part, streams=ask.streams)
        if answer.status is None:
            answer.status = grpc.StatusCode.OK if answer.end is not None else grpc.StatusCode.DATA_LOSS
    except (ConnectionResetError, h11.RemoteProtocolError) as error:
        answer.status, answer.detail = grpc.StatusCode.UNAVAILABLE, str(error)
    finally:
        connection.hang_up()


def _request(ask: Ask) -> bytes:
    sampling = ask.sampling
    body: dict[str, object] = {
        "prompt": list(ask.prompt),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "fidelity": ask.fidelity.value,
        "cache_salt": ask.cache_salt or None,
        "n": ask.choices,
        "stream": ask.streams,
        "stream_options": {"include_usage": True} if ask.streams else None,
        "return_token_ids": True,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: r\r\n{TENANT_HEADER}: {ask.tenant}\r\ncontent-type: application/json"
    )
    return f"{head}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


class _Response:
    """(status, part) of an answer as it comes: the events of a stream, or the whole body."""

    def __init__(self, connection: Connection, *, reads_every_s: float) -> None:
        self._connection = connection
        self._reads_every_s = reads_every_s
        self._parser = h11.Connection(our_role=h11.CLIENT)
        self._parser.send(h11.Request(method="POST", target="/", headers=[("host", "r"), ("content-length", "0")]))
        self._parser.send(h11.EndOfMessage())

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        status, body, streams = 0, b"", False
        while not isinstance(event := self._parser.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                await self._read()
            elif isinstance(event, h11.Response):
                status = event.status_code
                streams = any(name == b"content-type" and b"event-stream" in value for name, value in event.headers)
            elif isinstance(event, h11.Data):
                body += event.data
                while streams and b"\n\n" in body:
                    frame, _, body = body.partition(b"\n\n")
                    yield status, frame.removeprefix(b"data: ")
        if body:
            yield status, body

    async def _read(self) -> None:
        data = await self._connection.received.get()
        if isinstance(data, Exception):
            raise data
        if data is not END:
            await asyncio.sleep(self._reads_every_s)
            self._connection.note_read(len(data))
        self._parser.receive_data(b"" if data is END else data)


def _note(answer: Answer, status: int, part: bytes, *, streams: bool) -> None:
    if part == b"[DONE]":
        answer.finish()
        return
    said: dict[str, Any] = json.loads(part)
    if "error" in said:
        code = said["error"]["code"]
        answer.status, answer.detail = STATUSES.get(code, grpc.StatusCode.UNKNOWN), f"{status} {said['error']}"
        return
    for choice in said["choices"]:
        answer.say(choice["index"], choice["token_ids"])
        if choice["finish_reason"] is not None:
            answer.reasons[choice["index"]] = FinishReason(choice["finish_reason"])
    usage = said.get("usage")
    if usage is not None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        answer.told = End(usage["prompt_tokens"], usage["completion_tokens"], cached)
    if not streams:
        answer.finish()
