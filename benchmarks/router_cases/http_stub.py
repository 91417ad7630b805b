"""An HTTP worker that answers at once, for a router that speaks HTTP to its workers. A process of its own.

python -m router_cases.http_stub --port P
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import cast

import uvloop

MODEL = {"id": "whale", "object": "model"}
ANSWERS = {
    "/health": {},
    "/health_generate": {},
    "/get_model_info": {"model_path": "whale", "is_generation": True},
    "/get_server_info": {"model_path": "whale"},
    "/server_info": {"model_path": "whale"},
    "/model_info": {"model_path": "whale"},
    "/v1/models": {"object": "list", "data": [MODEL]},
    "/v1/completions": {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "whale",
        "choices": [{"index": 0, "text": " whale", "finish_reason": "length", "logprobs": None}],
        "usage": {"prompt_tokens": 64, "completion_tokens": 1, "total_tokens": 65},
    },
}


class Answering(asyncio.Protocol):
    """Reads heads and bodies, and looks at nothing but the path and the length."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's own class is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._buffer[:end]).decode("latin-1")
            lines = head.split("\r\n")
            length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
            if len(self._buffer) < end + 4 + length:
                return
            del self._buffer[: end + 4 + length]
            assert self._transport is not None
            if not lines[0].endswith(" HTTP/1.1"):  # asks for HTTP/2
                self._transport.close()
                return
            body = json.dumps(ANSWERS.get(lines[0].split(" ")[1], {})).encode()
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(answer + body)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))
