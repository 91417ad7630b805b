"""The HTTP front: which path does what. Everything behind a path lives in a module of its own.

request ─▶ headers (names, id) ─▶ body ─▶ endpoint ─▶ JSON, or a stream of events
                                                └─ ServingError ─▶ the protocol's error form, with its status
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from whalepod import __version__
from whalepod.cluster.api_keys import Scope as KeyScope
from whalepod.core.errors import ForbiddenError, InternalError, ServingError, UnavailableError
from whalepod.core.ids import mint_request_id
from whalepod.model.protocols import MESSAGES, RESPONSES, Protocol

from .authentication import Authenticator
from .chat import ChatRequest, parse_chat
from .chat_http import chat_answer, chat_frames
from .completions import parse_completion
from .completions_http import ResponseHead, completion_answer, completion_frames
from .dashboard import Dashboard
from .dashboard_sources import DashboardSources
from .events_http import count_tokens, events_answer, events_frames
from .front_door import Caller, FrontDoor
from .http_body import BODY_BYTES_MAX, read_json_object
from .http_errors import (
    ANTHROPIC_ERRORS,
    OPENAI_ERRORS,
    RESPONSES_ERRORS,
    ErrorForm,
    error_response,
    json_response,
    plain_error_response,
)
from .http_headers import REQUEST_ID_HEADER, SESSION_HEADER, HeaderMiddleware, wanted_rank
from .http_protocol import Exchange
from .http_stream import EventStream, Outlet, until_disconnect
from .openapi import openapi_document
from .purging import Purging
from .readiness import Readiness, generates_a_token
from .request_record import OK, RequestRecord, recorded
from .router_metrics import RouterGauges, exposition
from .token_endpoints import detokenize, tokenize
from .usage_log import UsageLog
from .workers import Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request to a generating endpoint. `body_chars`: about how long its body is."""

    request: Request
    body: Mapping[str, Any]
    body_chars: int
    caller: Caller
    record: RequestRecord
    errors: ErrorForm
    exchange: Exchange
    outlet: Outlet


Answer = Response | EventStream
Page = Callable[[Request], Awaitable[Answer]]
Endpoint = Callable[[HttpCall], Awaitable[Answer]]


class HttpFront:
    """The endpoints of one router."""

    def __init__(
        self,
        front: FrontDoor,
        readiness: Readiness,
        *,
        authenticator: Authenticator,
        usage_log: UsageLog | None = None,
        operators_apart: bool = False,
        add_address: Callable[[str], Awaitable[None]] | None = None,
        purge: Callable[[str], Awaitable[None]] | None = None,
        sources: DashboardSources | None = None,
        operator_hosts: Collection[str] = (),
        other_processes: Sequence[str] = (),
    ) -> None:
        """`operators_apart`: what only operators need is in `admin_app` alone. `add_address`: where ranks are found by
        address, takes one more. `purge`: puts what a tenant has stored out of reach. `sources`: what the dashboard
        shows beside this process's own numbers. `operator_hosts`: names by which a browser may have reached it to
        change something without a key. `other_processes`: where operators reach those that share its ports."""
        self._front = front
        self._readiness = readiness
        self._authenticator = authenticator
        self._usage_log = usage_log
        self._operators_apart = operators_apart
        self._operator_hosts = frozenset(host.lower() for host in operator_hosts)
        self._dashboard = Dashboard(readiness, sources or DashboardSources(), keys_known=authenticator.keys_known)
        self._workers = Workers(front.table, add_address=add_address, others=other_processes)
        self._purging = Purging(purge or _no_purges, keys_known=authenticator.keys_known)
        self._created = front.clock.unix_ms() // 1000
        self._gauges = RouterGauges(
            running=lambda: front.admission.running,
            store_ok=lambda: front.lookup.healthy,
            waiting=lambda: front.admission.waiting,
            ranks=lambda: list(front.table.ranks.values()),
        )

    def app(self) -> ASGIApp:
        """What clients are served."""
        post = {
            "/v1/completions": self._generating("completions", self._completions),
            "/v1/chat/completions": self._generating("chat_completions", self._chat),
            "/v1/responses": self._generating("responses", self._responses, RESPONSES_ERRORS),
            "/v1/messages": self._generating("messages", self._messages, ANTHROPIC_ERRORS),
            "/v1/messages/count_tokens": self._generating("count_tokens", self._count_tokens, ANTHROPIC_ERRORS),
            "/tokenize": self._generating("tokenize", self._tokenize),
            "/detokenize": self._generating("detokenize", self._detokenize),
        }
        get = {
            "/v1/models": self._for(self._models, "generate"),
            "/v1/models/{model:path}": self._for(self._model, "generate"),
            "/openapi.json": self._openapi,
            **self._health(),
        }
        routes = [] if self._operators_apart else self._operators(needs_key=True)
        return _application(post, [*_routes("GET", get), *routes])

    def admin_app(self) -> ASGIApp:
        """What operators are served, on a port that clients do not reach."""
        return _application({}, [*_routes("GET", self._health()), *self._operators(needs_key=False)])

    def _health(self) -> dict[str, Page]:
        alive, ready = ("/livez", "/live", "/liveness"), ("/readyz", "/ready", "/readiness", "/health")
        return {"/version": self._version, **dict.fromkeys(alive, self._livez), **dict.fromkeys(ready, self._readyz)}

    def _operators(self, *, needs_key: bool) -> list[Route]:
        def guarded(page: Page) -> Page:
            return self._for(page, "admin") if needs_key else page

        def changing(page: Page) -> Page:
            """Wants a key on either port, wherever there are keys, and no other site's page may ask."""
            hosts = None if self._authenticator.keys_known else self._operator_hosts
            return _from_no_other_site(self._for(page, "admin"), hosts=hosts)

        pages = {
            "/metrics": self._metrics,
            "/dashboard": self._dashboard_page,
            "/dashboard/events": guarded(self._dashboard_events),
            "/dashboard/key": self._for(self._dashboard_key, "admin"),
            "/workers": guarded(self._workers.get),
            "/health_generate": guarded(self._health_generate),
        }
        return [
            *_routes("GET", pages),
            *_routes("POST", {"/workers": changing(self._workers.post), "/purge": changing(self._purging.post)}),
            *_routes("DELETE", {"/workers/{rank:path}": changing(self._workers.delete)}),
        ]

    def _for(self, page: Page, scope: KeyScope) -> Page:
        """`page`, for those whose key has the scope."""

        async def serve(request: Request) -> Answer:
            try:
                self._authenticator.principal(request.headers, scope=scope)
            except ServingError as error:
                return error_response(error)
            return await page(request)

        return serve

    def _generating(
        self, name: str, endpoint: Endpoint, errors: ErrorForm = OPENAI_ERRORS
    ) -> Callable[[Request], Awaitable[Answer]]:
        async def serve(request: Request) -> Answer:
            request_id = request.headers[REQUEST_ID_HEADER]
            record = RequestRecord(
                name,
                request_id,
                clock=self._front.clock,
                usage_log=self._usage_log,
                traceparent=request.headers.get("traceparent", ""),
            )
            try:
                principal = self._authenticator.principal(request.headers)
                record.note_principal(principal)
                caller = self._front.caller(
                    principal,
                    traceparent=record.traceparent,
                    session=request.headers.get(SESSION_HEADER),
                    wanted_rank=wanted_rank(request.headers, self._front.table.decode_ranks),
                )
                record.follow(caller.state)
                exchange = Exchange.of(request.scope)
                body, length = await read_json_object(request, bytes_max=BODY_BYTES_MAX, whole=exchange.asked)
                answer = await endpoint(
                    HttpCall(request, body, length, caller, record, errors, exchange, Outlet(exchange))
                )
            except ServingError as error:
                record.end_with_error(error)
                return error_response(error, errors)
            except asyncio.CancelledError:  # by the server, whose time to drain is over
                error = UnavailableError("this router is shutting down")
                record.end_with_error(error)
                return error_response(error, errors)
            except Exception:
                log.exception("a request failed", extra={"request": record.request_id})
                error = InternalError("an internal error ended this request")
                record.end_with_error(error)
                return error_response(error, errors)
            if isinstance(answer, Response):
                record.end(OK)
            return answer

        return serve

    async def _completions(self, call: HttpCall) -> Answer:
        request = parse_completion(call.body, self._front)
        head = self._head("cmpl-")
        if request.stream:
            return await _stream(
                call, completion_frames(self._front, request, call.caller, head, call.record, call.outlet.relay)
            )
        work = completion_answer(self._front, request, call.caller, head, call.record)
        return json_response(await until_disconnect(call.exchange, work))

    async def _chat(self, call: HttpCall) -> Answer:
        request = parse_chat(call.body, self._front, body_chars=call.body_chars)
        head = self._head("chatcmpl-")
        if request.stream:
            return await _stream(
                call, chat_frames(self._front, request, call.caller, head, call.record, call.outlet.relay)
            )
        work = chat_answer(self._front, request, call.caller, head, call.record)
        return json_response(await until_disconnect(call.exchange, work))

    async def _responses(self, call: HttpCall) -> Answer:
        return await self._events(call, self._parsed(call, RESPONSES), self._head("resp_"))

    async def _messages(self, call: HttpCall) -> Answer:
        return await self._events(call, self._parsed(call, MESSAGES), self._head("msg_"))

    async def _events(self, call: HttpCall, request: ChatRequest, head: ResponseHead) -> Answer:
        if request.stream:
            return await _stream(
                call, events_frames(self._front, request, call.caller, head, call.record, call.outlet.relay)
            )
        work = events_answer(self._front, request, call.caller, head, call.record)
        return json_response(await until_disconnect(call.exchange, work))

    async def _count_tokens(self, call: HttpCall) -> Answer:
        return json_response(await count_tokens(self._front, self._parsed(call, MESSAGES)))

    def _parsed(self, call: HttpCall, protocol: Protocol) -> ChatRequest:
        return parse_chat(call.body, self._front, body_chars=call.body_chars, protocol=protocol)

    async def _tokenize(self, call: HttpCall) -> Answer:
        return json_response(await tokenize(self._front, call.body, body_chars=call.body_chars))

    async def _detokenize(self, call: HttpCall) -> Answer:
        return json_response(await detokenize(self._front, call.body))

    async def _models(self, request: Request) -> Response:
        del request
        return json_response({"object": "list", "data": [self._model_card()]})

    async def _model(self, request: Request) -> Response:
        try:
            self._front.check_model(request.path_params["model"])
        except ServingError as error:
            return error_response(error)
        return json_response(self._model_card())

    async def _version(self, request: Request) -> Response:
        del request
        return json_response({"version": __version__})

    async def _metrics(self, request: Request) -> Response:
        del request
        return Response(exposition(self._gauges), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _dashboard_page(self, request: Request) -> Response:
        """Holds no data: those come as events, which need a key where one is needed."""
        del request
        return self._dashboard.page()

    async def _dashboard_events(self, request: Request) -> Answer:
        del request
        try:
            return await self._dashboard.events()
        except ServingError as error:
            return error_response(error)

    async def _dashboard_key(self, request: Request) -> Response:
        """For whoever wants to know whether a key is an operator's."""
        return json_response({"key": self._authenticator.principal(request.headers, scope="admin").key_name})

    async def _livez(self, request: Request) -> Response:
        del request
        return json_response({"status": "alive"})

    async def _readyz(self, request: Request) -> Response:
        del request
        report = self._readiness.report()
        return json_response(report.to_json(), status=200 if report.ready else 503)

    async def _health_generate(self, request: Request) -> Response:
        del request
        try:
            await generates_a_token(self._front)
        except ServingError as error:
            return error_response(error)
        return json_response({"status": "ready"})

    async def _openapi(self, request: Request) -> Response:
        del request
        return json_response(openapi_document(version=__version__))

    def _head(self, prefix: str) -> ResponseHead:
        created = self._front.clock.unix_ms() // 1000
        return ResponseHead(prefix + mint_request_id().hex(), created, self._front.model.name)

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._front.model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "whalepod",
            "max_model_len": self._front.context_tokens_max,
        }


def _from_no_other_site(page: Page, *, hosts: Collection[str] | None) -> Page:
    """`page`, unless a browser says that the page of another site asks: without keys, that is all it would take. Nor is
    a browser believed that has come by a name which is none of `hosts` and may be anybody's: whoever it belongs to may
    have had it lead here once his page was loaded. None: any name will do."""

    async def serve(request: Request) -> Answer:
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        host = request.headers.get("host")
        told = site in ("same-origin", "none") if site else origin is None or _is_of(origin, host)
        if not told:
            return error_response(ForbiddenError("a page of another site asked for this"))
        if (site or origin) and hosts is not None and not _is_ours(host or "", hosts):
            return error_response(
                ForbiddenError(
                    "without API keys (router.api_keys_file) nothing is changed from a page under this name: use an "
                    "address or localhost, or add the name to router.operator_hosts"
                )
            )
        return await page(request)

    return serve


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    """Whether a Host header is an address, a name that no stranger can own (of one label), or one of `hosts`."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        ipaddress.ip_address(name)
    except ValueError:
        name = host.rpartition(":")[0] or host
        return name.lower() in hosts or ("." not in name and name != "") or name.lower().endswith(".localhost")
    return True


def _is_of(origin: str, host: str | None) -> bool:
    try:
        return bool(host) and urlsplit(origin).netloc == host
    except ValueError:
        return False


async def _no_purges(tenant: str) -> None:
    raise UnavailableError(f"the purge of {tenant} cannot be written down: this router has no registry")


def _routes(method: str, pages: Mapping[str, Callable[[Request], Awaitable[Answer]]]) -> list[Route]:
    return [Route(path, page, methods=[method]) for path, page in pages.items()]


def _application(post: Mapping[str, Callable[[Request], Awaitable[Answer]]], routes: Sequence[Route]) -> ASGIApp:
    routed = Starlette(
        routes=[*_routes("POST", post), *routes], exception_handlers={HTTPException: _refused_by_routing}
    )
    routed.router.redirect_slashes = False  # to wherever the client's Host header says

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        """What generates goes the short way: it leaves no exception to a framework, which would cost it 0.1 ms."""
        endpoint = post.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if endpoint is None:
            await routed(scope, receive, send)
            return
        answer = await endpoint(Request(scope, receive))
        await answer(scope, receive, send)

    return HeaderMiddleware(serve)


async def _stream(call: HttpCall, frames: AsyncGenerator[bytes, None]) -> EventStream:
    """The response begins with the first event: until then a failure has its own status."""
    events = recorded(frames, call.record)

    async def read_first() -> bytes:
        return await anext(events)

    try:
        first = await until_disconnect(call.exchange, read_first())
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, errors=call.errors, outlet=call.outlet)


async def _refused_by_routing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is no {request.url.path} here", 405: f"{request.url.path} does not take {request.method}"}
    return plain_error_response(error.status_code, messages.get(error.status_code, error.detail), headers=error.headers)
