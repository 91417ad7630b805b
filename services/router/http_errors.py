"""Errors as HTTP clients see them: OpenAI's form, one table over the tree of `core/errors.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import Response

from whalepod.core.errors import (
    AuthenticationError,
    CancelledError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
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

RETRY_AFTER_S = 1.0
"""With 503, when nothing better is known: about how long a rank takes to be noticed again."""


class BodyTooLargeError(RequestError):
    """The body is larger than this router reads."""


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
    ModelNotFoundError: HttpError(404, "invalid_request_error", "model_not_found"),
    AuthenticationError: HttpError(401, "authentication_error", "invalid_api_key"),
    BodyTooLargeError: HttpError(413, "invalid_request_error", "request_too_large"),
    MediaTypeError: HttpError(415, "invalid_request_error", "unsupported_media_type"),
    QueueFullError: HttpError(429, "rate_limit_error", "rate_limit_exceeded"),
    CapacityError: HttpError(503, "server_error", "no_capacity"),
    WorkerLostError: HttpError(502, "server_error", "worker_lost"),
    UnavailableError: HttpError(503, "server_error", "unavailable"),
    DeadlineError: HttpError(504, "server_error", "deadline_exceeded"),
    CancelledError: HttpError(499, "invalid_request_error", "client_closed_request"),
    StaleAttemptError: HttpError(500, "server_error", "internal_error"),
    InternalError: HttpError(500, "server_error", "internal_error"),
    ServingError: HttpError(500, "server_error", "internal_error"),
}


def http_error_of(error: ServingError) -> HttpError:
    """The entry of the nearest class in the table."""
    return next(HTTP_ERRORS[base] for base in type(error).__mro__ if base in HTTP_ERRORS)


def error_body(error: ServingError) -> dict[str, object]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    entry = http_error_of(error)
    return _body(str(error), entry, getattr(error, "field", None))


def error_response(error: ServingError) -> Response:
    """`Retry-After` comes with 429 and 503."""
    entry = http_error_of(error)
    headers: dict[str, str] = {}
    if entry.status in (429, 503):
        seconds = getattr(error, "retry_after_s", None) or RETRY_AFTER_S
        headers["retry-after"] = str(max(1, math.ceil(seconds)))
    return json_response(error_body(error), status=entry.status, headers=headers)


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
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _body(message: str, entry: HttpError, param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": entry.type, "param": param, "code": entry.code}}
