"""A small client of the gRPC front door: text or token ids in, text and token ids out, whole or as they come.

    with Client("127.0.0.1:8001") as client:
        print(client.generate("Hello", max_tokens=16).text)
        for delta in client.stream("Hello", max_tokens=16): ...

`AsyncClient` is the same with `await` and `async for`. A call that fails raises the ServingError the cluster ended it
with; leaving a stream stops its request on every rank.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc

from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.grpc_options import channel_options
from whalepod.cluster.wire import FIDELITIES, finish_reason_from_proto, sampling_to_proto
from whalepod.engine.interface import Fidelity, FinishReason
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Generated:
    """A delta of a stream, or a whole answer. From `finish_reason` on, fields are set at the end only.

    `logprobs` holds one float32 value for each token id if they were asked for, else nothing; `prompt_logprobs` one for
    each token of the prompt but the first.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    decode_rank: str = ""
    prefill_rank: str = ""
    """Empty: the decode rank computed the prompt."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """What to generate from. `sampling` None: the defaults with `max_tokens`."""

    prompt: str | Sequence[int]
    sampling: SamplingParams | None = None
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    cache_salt: str = ""
    user: str = ""
    """Whom you answer for: shares stored prefixes with itself alone."""
    fidelity: Fidelity | None = None
    model: str = ""

    def to_proto(self) -> router_pb2.GenerateRequest:
        sampling = self.sampling or SamplingParams(max_tokens=self.max_tokens)
        request = router_pb2.GenerateRequest(
            model=self.model,
            sampling=sampling_to_proto(sampling),
            stop=self.stop,
            cache_salt=self.cache_salt,
            user=self.user,
            fidelity=common_pb2.FIDELITY_UNSPECIFIED if self.fidelity is None else FIDELITIES[self.fidelity],
        )
        if isinstance(self.prompt, str):
            request.text = self.prompt
        else:
            request.token_ids.ids.extend(self.prompt)
        return request


class Client:
    """Synchronous; safe to share between threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`timeout_s` is the deadline of each call; the cluster's own may be shorter. `tls`: as
        `grpc.ssl_channel_credentials` makes it; None: plain text."""
        self._timeout_s = timeout_s
        self._metadata = _metadata(api_key)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=channel_options())
        else:
            self._channel = grpc.secure_channel(address, tls, options=channel_options())
        self._stub: Any = router_pb2_grpc.RouterServiceStub(self._channel)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generated:  # noqa: ANN401  fields of Ask
        """The whole answer. `options` are the other fields of `Ask`."""
        request = Ask(prompt, **options).to_proto()
        try:
            return _whole(self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[Generated]:  # noqa: ANN401
        """Deltas; the last one carries the finish reason and the counts."""
        call = self._stub.GenerateStream(
            Ask(prompt, **options).to_proto(), timeout=self._timeout_s, metadata=self._metadata
        )
        try:
            for message in call:
                yield _delta(message)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A `chat.completion` object for the body of a `/v1/chat/completions` request."""
        request = router_pb2.ChatRequest(body_json=json.dumps(body))
        try:
            return json.loads(self._stub.Chat(request, timeout=self._timeout_s, metadata=self._metadata).body_json)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error

    def chat_stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """`chat.completion.chunk` objects; the last one carries the usage."""
        call = self._stub.ChatStream(
            router_pb2.ChatRequest(body_json=json.dumps(body)), timeout=self._timeout_s, metadata=self._metadata
        )
        try:
            for message in call:
                yield json.loads(message.chunk_json)
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """For one event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        """As of `Client`."""
        self._timeout_s = timeout_s
        self._metadata = _metadata(api_key)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        else:
            self._channel = grpc.aio.secure_channel(address, tls, options=channel_options())
        self._stub: Any = router_pb2_grpc.RouterServiceStub(self._channel)

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Generated:  # noqa: ANN401  fields of Ask
        """The whole answer. `options` are the other fields of `Ask`."""
        request = Ask(prompt, **options).to_proto()
        try:
            return _whole(await self._stub.Generate(request, timeout=self._timeout_s, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def stream(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[Generated]:  # noqa: ANN401
        """Deltas; the last one carries the finish reason and the counts."""
        call = self._stub.GenerateStream(
            Ask(prompt, **options).to_proto(), timeout=self._timeout_s, metadata=self._metadata
        )
        try:
            async for message in call:
                yield _delta(message)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A `chat.completion` object for the body of a `/v1/chat/completions` request."""
        request = router_pb2.ChatRequest(body_json=json.dumps(body))
        try:
            response = await self._stub.Chat(request, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return json.loads(response.body_json)

    async def chat_stream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """`chat.completion.chunk` objects; the last one carries the usage."""
        call = self._stub.ChatStream(
            router_pb2.ChatRequest(body_json=json.dumps(body)), timeout=self._timeout_s, metadata=self._metadata
        )
        try:
            async for message in call:
                yield json.loads(message.chunk_json)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _whole(message: router_pb2.GenerateResponse) -> Generated:
    return _generated(message, message.text)


def _delta(message: router_pb2.GenerateStreamResponse) -> Generated:
    return _generated(message, message.text_delta)


def _generated(message: router_pb2.GenerateResponse | router_pb2.GenerateStreamResponse, text: str) -> Generated:
    return Generated(
        id=message.id,
        text=text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(message.logprobs),
        prompt_logprobs=tuple(message.prompt_logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        cached_tokens=message.usage.cached_tokens,
        decode_rank=message.route.decode_rank,
        prefill_rank=message.route.prefill_rank,
        attempts=message.route.attempts,
    )
