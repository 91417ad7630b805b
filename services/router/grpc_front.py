"""The gRPC front: `RouterService` with the semantics of the HTTP one. Translates, calls, and translates back."""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NoReturn, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.grpc_options import server_options
from whalepod.cluster.tls import ServerTls
from whalepod.cluster.wire import FINISH_REASONS, fidelity_from_proto, sampling_from_proto
from whalepod.core.clock import Deadline
from whalepod.core.errors import ConfigError, InternalError, InvalidFieldError, ServingError
from whalepod.core.ids import mint_request_id
from whalepod.core.tracing import span
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc

from .answer_format import AnswerFormat
from .authentication import Authenticator
from .body_models import STOP_CHARS_MAX, STOP_STRINGS_MAX, check_token_ids
from .chat import ChatRequest, parse_chat
from .chat_http import chat_answer, chat_chunks
from .completions_http import ResponseHead
from .front_door import Caller, FrontDoor
from .http_body import PARSE_ON_LOOP_BYTES_MAX, parse_json_object
from .http_errors import json_text
from .http_headers import REQUEST_ID_BYTES_MAX, REQUEST_ID_HEADER, SINGLE_HEADERS, given_twice
from .job import Job, Route
from .language import Language
from .prompts import Prompt, TextPrompt, packed_prompt
from .request_record import OK, RequestRecord, recorded
from .tenancy import USER_CHARS_MAX
from .text_choice import TextDelta, TextEnd, TextEvent, TextOptions, TextScores, stream_text
from .usage import Usage
from .usage_log import UsageLog

log = logging.getLogger(__name__)

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name

IDS_AT_A_TIME = 8192
"""Ids of a prompt that are read without a pause, and on the event loop."""

UNREAD_SECONDS_MAX = 5.0
"""How long after its deadline a call may still wait for its client to read."""

Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """A call that is cancelled stops its request on every rank; a call's own deadline shortens ours."""

    def __init__(self, front: FrontDoor, *, authenticator: Authenticator, usage_log: UsageLog | None = None) -> None:
        self._front = front
        self._authenticator = authenticator
        self._usage_log = usage_log

    async def Generate(  # noqa: N802  the RPC's name
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> router_pb2.GenerateResponse:
        response = router_pb2.GenerateResponse()
        async with aclosing(self._generate(request, context, "grpc_generate")) as deltas:
            async for delta in deltas:
                response.id = delta.id
                response.text += delta.text_delta
                response.token_ids.extend(delta.token_ids)
                response.logprobs.extend(delta.logprobs)
                response.prompt_logprobs.extend(delta.prompt_logprobs)
                if delta.HasField("usage"):
                    response.finish_reason = delta.finish_reason
                    response.usage.CopyFrom(delta.usage)
                    response.route.CopyFrom(delta.route)
        return response

    async def GenerateStream(  # noqa: N802  the RPC's name
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateStreamResponse]:
        async with aclosing(self._generate(request, context, "grpc_generate_stream")) as deltas:
            async for delta in deltas:
                yield delta

    async def Chat(  # noqa: N802  the RPC's name
        self, request: router_pb2.ChatRequest, context: Context
    ) -> router_pb2.ChatResponse:
        async with self._call(context, "grpc_chat") as (caller, record):
            chat, head = await self._chat_request(request.body_json)
            answer = await chat_answer(self._front, chat, caller, head, record)
            record.end(OK)
            return router_pb2.ChatResponse(body_json=json_text(answer))
        raise AssertionError("a call that failed was aborted")

    async def ChatStream(  # noqa: N802  the RPC's name
        self, request: router_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[router_pb2.ChatStreamResponse]:
        async with self._call(context, "grpc_chat_stream") as (caller, record):
            chat, head = await self._chat_request(request.body_json)
            chunks = recorded(chat_chunks(self._front, chat, caller, head, record), record)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield router_pb2.ChatStreamResponse(chunk_json=chunk)

    async def _generate(
        self, request: router_pb2.GenerateRequest, context: Context, endpoint: str
    ) -> AsyncGenerator[router_pb2.GenerateStreamResponse, None]:
        async with self._call(context, endpoint) as (caller, record):
            events = recorded(self._text_events(request, caller, record), record)
            async with aclosing(events):
                async for event in events:
                    yield event

    async def _text_events(
        self, request: router_pb2.GenerateRequest, caller: Caller, record: RequestRecord
    ) -> AsyncGenerator[router_pb2.GenerateStreamResponse, None]:
        front = self._front
        options = _text_options(request)
        prompt = await _prompt(request, front.language)
        front.check_model(request.model)
        response_id = "gen-" + mint_request_id().hex()
        async with front.admitted(caller, choices=1, priority=request.priority):
            job = await self._job(request, prompt, caller)
            async with aclosing(stream_text(front, job, caller, options)) as events:
                async for event in events:
                    if isinstance(event, TextEnd):
                        usage = Usage(event.prompt_tokens, event.cached_tokens, event.completion_tokens)
                        record.note_result(usage, event.route)
                    yield _stream_response(response_id, event)

    async def _job(self, request: router_pb2.GenerateRequest, prompt: Prompt, caller: Caller) -> Job:
        front = self._front
        with span("tokenize", caller.traceparent):
            ids = await front.language.prompt_ids(prompt, context_tokens=front.context_tokens_max)
        front.check_length(len(ids), 1)
        sampling = _sampling(request, vocab_size=front.language.vocab_size)
        if sampling.grammar is not None:
            await front.language.check_format(AnswerFormat(sampling.grammar, "grammar"), deadline=caller.deadline)
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=front.context_tokens_max - len(ids))
        fidelity = front.model.fidelity_default
        if request.fidelity != common_pb2.FIDELITY_UNSPECIFIED:
            fidelity = fidelity_from_proto(request.fidelity)
        (job,) = await front.jobs(
            caller.on_behalf_of(_user(request)),
            ids,
            sampling,
            fidelity=fidelity,
            priority=request.priority,
            cache_salt=request.cache_salt or None,
        )
        return job

    async def _chat_request(self, body_json: str) -> tuple[ChatRequest, ResponseHead]:
        if len(body_json) <= PARSE_ON_LOOP_BYTES_MAX:
            body = parse_json_object(body_json)
        else:
            body = await self._front.language.run(lambda: parse_json_object(body_json))
        created = self._front.clock.unix_ms() // 1000
        head = ResponseHead("chatcmpl-" + mint_request_id().hex(), created, self._front.model.name)
        return parse_chat(body, self._front, body_chars=len(body_json)), head

    @asynccontextmanager
    async def _call(self, context: Context, endpoint: str) -> AsyncGenerator[tuple[Caller, RequestRecord], None]:
        """Who calls, and a record that ends with the call. A ServingError inside becomes the call's status."""
        headers = _headers(context)
        request_id = headers[REQUEST_ID_HEADER]
        record = RequestRecord(
            endpoint,
            request_id,
            clock=self._front.clock,
            usage_log=self._usage_log,
            traceparent=headers.get("traceparent", ""),
        )
        try:
            await context.send_initial_metadata(((REQUEST_ID_HEADER, record.request_id),))
            _check_single(context, headers)
            principal = self._authenticator.principal(headers)
            record.note_principal(principal)
            caller = self._front.caller(principal, timeout_s=context.time_remaining(), traceparent=record.traceparent)
            record.follow(caller.state)
            with _until_given_up(caller.deadline):
                yield caller, record
        except ServingError as error:
            record.end_with_error(error)
            await _abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception:
            log.exception("a call failed", extra={"request": record.request_id})
            error = InternalError("an internal error ended this request")
            record.end_with_error(error)
            await _abort(context, error)
        finally:
            record.end("cancelled")


class GrpcService(Protocol):
    def register(self, server: grpc.aio.Server) -> None: ...


class GrpcFront:
    """The public gRPC server of one router: `RouterService`, health and reflection."""

    def __init__(
        self,
        front: FrontDoor,
        *,
        authenticator: Authenticator,
        usage_log: UsageLog | None = None,
        shares_port: bool = False,
    ) -> None:
        """`shares_port`: with other processes."""
        self._server = grpc.aio.server(options=server_options(shares_port=shares_port))
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]  # set at import
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        servicer = RouterServicer(front, authenticator=authenticator, usage_log=usage_log)
        router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def bind(self, address: str, *, tls: ServerTls | None = None) -> int:
        """Returns the port. Raises ConfigError if it is taken."""
        try:
            if tls is not None:
                return self._server.add_secure_port(address, tls.grpc_credentials())
            return self._server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(f"the router cannot listen on {address} (router.grpc_port): is it in use?") from None

    def add(self, service: GrpcService) -> None:
        """One more service, before `start`."""
        service.register(self._server)

    async def start(self) -> None:
        await self._server.start()
        await self.set_serving(serving=True)

    async def set_serving(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def stop(self, *, grace_s: float) -> None:
        await self._server.stop(grace_s)


@contextmanager
def _until_given_up(deadline: Deadline) -> Generator[None, None, None]:
    """Cancels the call a while after its deadline: while it waits for its client to read, nothing else would end it."""
    call = asyncio.current_task()
    assert call is not None
    seconds = deadline.remaining_s() + UNREAD_SECONDS_MAX
    timer = asyncio.get_running_loop().call_later(seconds, call.cancel)
    try:
        yield
    finally:
        timer.cancel()


def _headers(context: Context) -> Mapping[str, str]:
    """Metadata as headers: text values, `_` as `-`, and an id if the client gave none."""
    metadata = context.invocation_metadata() or ()
    headers = {str(key).replace("_", "-"): value for key, value in metadata if isinstance(value, str)}
    request_id = headers.get(REQUEST_ID_HEADER, "")[:REQUEST_ID_BYTES_MAX] or mint_request_id().hex()
    return {**headers, REQUEST_ID_HEADER: request_id}


def _check_single(context: Context, headers: Mapping[str, str]) -> None:
    """Raises InvalidFieldError if two values of the metadata say who asks."""
    for key, value in context.invocation_metadata() or ():
        name = str(key).replace("_", "-")
        if name in SINGLE_HEADERS and headers.get(name, value) != value:
            raise given_twice(name)


async def _prompt(request: router_pb2.GenerateRequest, language: Language) -> Prompt:
    """Raises InvalidFieldError on an empty prompt or an id outside the vocabulary."""
    kind = request.WhichOneof("prompt")
    ids = request.token_ids.ids
    if (kind == "text" and not request.text) or (kind == "token_ids" and not ids) or kind is None:
        raise InvalidFieldError("prompt", "prompt must not be empty")
    if kind == "text":
        return TextPrompt(request.text)
    packed = _packed(ids) if len(ids) <= IDS_AT_A_TIME else await language.run(lambda: _packed(ids))
    return packed_prompt(packed, vocab_size=language.vocab_size)


def _packed(ids: Sequence[int]) -> array[int]:
    """Some at a time, between which other threads have their turn: a million take 40 ms."""
    packed: array[int] = array("I")
    for start in range(0, len(ids), IDS_AT_A_TIME):
        packed.extend(ids[start : start + IDS_AT_A_TIME])
    return packed


def _user(request: router_pb2.GenerateRequest) -> str | None:
    if len(request.user) > USER_CHARS_MAX:
        raise InvalidFieldError("user", f"user must have at most {USER_CHARS_MAX} characters")
    return request.user or None


def _text_options(request: router_pb2.GenerateRequest) -> TextOptions:
    if len(request.stop) > STOP_STRINGS_MAX or not all(0 < len(stop) <= STOP_CHARS_MAX for stop in request.stop):
        raise InvalidFieldError(
            "stop", f"stop must be at most {STOP_STRINGS_MAX} strings of 1 to {STOP_CHARS_MAX} characters"
        )
    return TextOptions(stop=tuple(request.stop))


def _sampling(request: router_pb2.GenerateRequest, *, vocab_size: int) -> SamplingParams:
    sampling = sampling_from_proto(request.sampling)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size=vocab_size)
    check_token_ids("logit_bias", sampling.logit_bias, vocab_size=vocab_size)
    check_token_ids("allowed_token_ids", sampling.allowed_token_ids or (), vocab_size=vocab_size)
    check_token_ids("bad_word_ids", chain.from_iterable(sampling.bad_word_ids), vocab_size=vocab_size)
    return sampling


def _stream_response(response_id: str, event: TextEvent) -> router_pb2.GenerateStreamResponse:
    if isinstance(event, TextScores):
        scores = [token.logprob for token in event.tokens if token.logprob is not None]
        return router_pb2.GenerateStreamResponse(id=response_id, prompt_logprobs=scores)
    if isinstance(event, TextDelta):
        return router_pb2.GenerateStreamResponse(
            id=response_id,
            text_delta=event.text,
            token_ids=[token.id for token in event.tokens],
            logprobs=[token.logprob for token in event.tokens if token.logprob is not None],
        )
    return router_pb2.GenerateStreamResponse(
        id=response_id,
        finish_reason=FINISH_REASONS[event.reason],
        usage=router_pb2.Usage(
            prompt_tokens=event.prompt_tokens,
            completion_tokens=event.completion_tokens,
            cached_tokens=event.cached_tokens,
        ),
        route=_route(event.route),
    )


def _route(route: Route | None) -> router_pb2.Route | None:
    if route is None:
        return None
    return router_pb2.Route(
        prefill_rank=route.prefill_rank or "", decode_rank=route.decode_rank, attempts=route.attempts
    )


async def _abort(context: Context, error: ServingError) -> NoReturn:
    status, message, metadata = status_of_error(error)
    await context.abort(status, message, metadata)
