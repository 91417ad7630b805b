"""Errors as HTTP clients see them: one table over the tree of `core/errors.py`, in the form of each protocol."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from starlette.responses import Response

from whalepod.cluster.error_codes import MESSAGE_CHARS_MAX
from whalepod.core.errors import (
    AuthenticationError,
    CancelledError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    DrainingError,
    ForbiddenError,
    ImageError,
    InternalError,
    InvalidFieldError,
    ModelNotFoundError,
    RequestError,
    ServingError,
    StaleAttemptError,
    UnavailableError,
    WorkerLostError,
)

from .admission import QueueFullError
from .tenant_limits import TenantLimitError

RETRY_AFTER_S = 1.0
"""With 503, when nothing better is known: about how long a rank takes to be noticed again."""


class BodyTooLargeError(RequestError):
    """The body is larger than this router reads."""


class BodyTooSlowError(RequestError):
    """The client did not send its body in time."""


class HeadersTooLargeError(RequestError):
    """The request's headers are larger than this router reads."""


class MediaTypeError(RequestError):
    """The body is not JSON by its own account."""


@dataclass(frozen=True, slots=True)
class HttpError:
    status: int
    type: str
    code: str | None


HTTP_ERRORS: Mapping[type[ServingError], HttpError] = {
    RequestError: HttpError(400, "invalid_request_error", None),
    InvalidFieldError: HttpError(400, "invalid_request_error", "invalid_value"),
    ContextLengthError: HttpError(400, "invalid_request_error", "context_length_exceeded"),
    ImageError: HttpError(400, "invalid_request_error", "invalid_image"),
    ModelNotFoundError: HttpError(404, "invalid_request_error", "model_not_found"),
    AuthenticationError: HttpError(401, "authentication_error", "invalid_api_key"),
    ForbiddenError: HttpError(403, "permission_error", "forbidden"),
    BodyTooLargeError: HttpError(413, "invalid_request_error", "request_too_large"),
    BodyTooSlowError: HttpError(408, "invalid_request_error", "request_timeout"),
    HeadersTooLargeError: HttpError(431, "invalid_request_error", "headers_too_large"),
    MediaTypeError: HttpError(415, "invalid_request_error", "unsupported_media_type"),
    QueueFullError: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    TenantLimitError: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    CapacityError: HttpError(503, "server_error", "no_capacity"),
    WorkerLostError: HttpError(502, "server_error", "worker_lost"),
    DrainingError: HttpError(503, "server_error", "unavailable"),
    UnavailableError: HttpError(503, "server_error", "unavailable"),
    DeadlineError: HttpError(504, "server_error", "deadline_exceeded"),
    CancelledError: HttpError(499, "invalid_request_error", "client_closed_request"),
    StaleAttemptError: HttpError(500, "server_error", "internal_error"),
    InternalError: HttpError(500, "server_error", "internal_error"),
    ServingError: HttpError(500, "server_error", "internal_error"),
}


ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    499: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; any other is an `api_error`."""


def http_error_of(error: ServingError) -> HttpError:
    """The entry of the nearest class in the table."""
    return next(HTTP_ERRORS[base] for base in type(error).__mro__ if base in HTTP_ERRORS)


def error_body(error: ServingError) -> dict[str, object]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    entry = http_error_of(error)
    if isinstance(error, ImageError):
        entry = replace(entry, code=_snake_case(error.kind))
    return _body(str(error), entry, getattr(error, "field", None))


def anthropic_error_body(error: ServingError) -> dict[str, object]:
    """`{"type": "error", "error": {"type", "message"}}`."""
    kind = ANTHROPIC_TYPES.get(http_error_of(error).status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": _told(str(error))}}


def responses_event_body(error: ServingError) -> dict[str, object]:
    """The `error` event of a Responses stream; `error` beside it is what the other streams end with."""
    told = error_body(error)
    inner = told["error"]
    assert isinstance(inner, dict)
    return {"type": "error", **{name: inner[name] for name in ("code", "message", "param")}, **told}


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How one protocol's clients are told: in the body of an answer, and in the event that ends a broken stream."""

    body: Callable[[ServingError], dict[str, object]] = error_body
    event_body: Callable[[ServingError], dict[str, object]] = error_body
    event: str | None = None


OPENAI_ERRORS = ErrorForm()
RESPONSES_ERRORS = ErrorForm(event_body=responses_event_body, event="error")
ANTHROPIC_ERRORS = ErrorForm(anthropic_error_body, anthropic_error_body, "error")


def error_response(error: ServingError, form: ErrorForm = OPENAI_ERRORS) -> Response:
    """`Retry-After` comes with 429 and 503. What drains ends the connection, too: the next one may reach another."""
    entry = http_error_of(error)
    headers: dict[str, str] = {}
    if entry.status == 401:
        headers["www-authenticate"] = "Bearer"
    if entry.status in (429, 503):
        seconds = getattr(error, "retry_after_s", None) or RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    if isinstance(error, DrainingError):
        headers["connection"] = "close"
    return json_response(form.body(error), status=entry.status, headers=headers)


def plain_error_response(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> Response:
    """For what the HTTP layer itself refuses: an unknown path, a method that a path does not have."""
    code = {404: "not_found", 405: "method_not_allowed"}.get(status)
    return json_response(_body(message, HttpError(status, "invalid_request_error", code), None), status, headers)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        json_text(body).encode("utf-8", "replace"),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def json_text(body: object) -> str:
    """As short as it can be. May hold lone surrogates, which no UTF-8 has."""
    return _JSON.encode(body)


_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one for each object."""


def _snake_case(name: str) -> str:
    """`UnsupportedMediaType` is `unsupported_media_type`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _body(message: str, entry: HttpError, param: str | None) -> dict[str, object]:
    return {"error": {"message": _told(message), "type": entry.type, "param": param, "code": entry.code}}


def _told(message: str) -> str:
    """Some messages quote what the client sent: as much of it as a reader needs, and what was expected, at the end."""
    half = MESSAGE_CHARS_MAX // 2
    return message if len(message) <= MESSAGE_CHARS_MAX else f"{message[:half]} … {message[-half:]}"
