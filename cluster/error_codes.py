"""How an error crosses a process border: its kind, its message and its attributes, and the gRPC status beside them.

One table over the whole tree of `core/errors.py`, read in both directions. An error that our own code raised carries
the trailing metadata `whalepod-error` (its kind) and one `whalepod-<attribute>` for each attribute, so that the other
side raises the same class again. A status without them was made by the network or by gRPC itself: the peer is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

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

METADATA_PREFIX = "whalepod-"
KIND_KEY = "whalepod-error"
MESSAGE_CHARS_MAX = 2000
"""A status message travels in HTTP/2 headers, which are limited to 8 KiB by default."""


@dataclass(frozen=True, slots=True)
class ErrorCode:
    error_class: type[ServingError]
    status: grpc.StatusCode


ERROR_CODES: Mapping[str, ErrorCode] = {
    "serving": ErrorCode(ServingError, grpc.StatusCode.UNKNOWN),
    "request": ErrorCode(RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    "invalid_field": ErrorCode(InvalidFieldError, grpc.StatusCode.INVALID_ARGUMENT),
    "context_length": ErrorCode(ContextLengthError, grpc.StatusCode.INVALID_ARGUMENT),
    "image": ErrorCode(ImageError, grpc.StatusCode.INVALID_ARGUMENT),
    "model_not_found": ErrorCode(ModelNotFoundError, grpc.StatusCode.NOT_FOUND),
    "authentication": ErrorCode(AuthenticationError, grpc.StatusCode.UNAUTHENTICATED),
    "forbidden": ErrorCode(ForbiddenError, grpc.StatusCode.PERMISSION_DENIED),
    "unavailable": ErrorCode(UnavailableError, grpc.StatusCode.UNAVAILABLE),
    "capacity": ErrorCode(CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    "worker_lost": ErrorCode(WorkerLostError, grpc.StatusCode.UNAVAILABLE),
    "draining": ErrorCode(DrainingError, grpc.StatusCode.UNAVAILABLE),
    "deadline": ErrorCode(DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    "cancelled": ErrorCode(CancelledError, grpc.StatusCode.CANCELLED),
    "stale_attempt": ErrorCode(StaleAttemptError, grpc.StatusCode.ABORTED),
    "internal": ErrorCode(InternalError, grpc.StatusCode.INTERNAL),
}
KINDS: Mapping[type[ServingError], str] = {code.error_class: kind for kind, code in ERROR_CODES.items()}

ATTRIBUTES: Mapping[str, type[str] | type[int] | type[float]] = {
    "field": str,
    "kind": str,
    "tokens": int,
    "tokens_max": int,
    "retry_after_s": float,
}
"""Every attribute that a class of the tree may have. One that is None does not travel."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as plain data. `kind` is a key of `ERROR_CODES`."""

    kind: str
    message: str
    attributes: Mapping[str, Any]


def kind_of_error(error: ServingError) -> str:
    """The kind of the nearest class in the table: a class of tomorrow travels as its parent."""
    return next(KINDS[base] for base in type(error).__mro__ if base in KINDS)


def record_of_error(error: ServingError) -> ErrorRecord:
    attributes = {name: value for name in ATTRIBUTES if (value := getattr(error, name, None)) is not None}
    return ErrorRecord(kind_of_error(error), str(error), attributes)


def error_from_record(record: ErrorRecord) -> ServingError:
    """The same class, message and attributes again. An unknown kind is an InternalError: a newer peer's, or a bug."""
    code = ERROR_CODES.get(record.kind)
    if code is None:
        return InternalError(record.message)
    # The classes build their messages from their own arguments; the message is already built.
    error = code.error_class.__new__(code.error_class, record.message)
    if issubclass(code.error_class, CapacityError):
        error.__dict__["retry_after_s"] = None
    error.__dict__.update(record.attributes)
    return error


def status_of_error(error: ServingError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status code, status message and trailing metadata, for `ServicerContext.abort`."""
    record = record_of_error(error)
    metadata = [(KIND_KEY, record.kind)]
    for name, value in record.attributes.items():
        text = str(value).encode("ascii", "backslashreplace").decode("ascii")
        metadata.append((METADATA_PREFIX + name.replace("_", "-"), text))
    return ERROR_CODES[record.kind].status, record.message[:MESSAGE_CHARS_MAX], tuple(metadata)


def error_from_status(
    status: grpc.StatusCode, message: str | None, metadata: Iterable[tuple[str, str | bytes]] | None
) -> ServingError:
    """The error that a failed call stands for."""
    values = {key: value for key, value in metadata or () if isinstance(value, str)}
    text = message or status.name.lower().replace("_", " ")
    if KIND_KEY in values:
        attributes = {
            name: parse(values[key])
            for name, parse in ATTRIBUTES.items()
            if (key := METADATA_PREFIX + name.replace("_", "-")) in values
        }
        return error_from_record(ErrorRecord(values[KIND_KEY], text, attributes))
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(text)
    if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE):
        return RequestError(text)
    return WorkerLostError(text)


def error_from_rpc(error: grpc.RpcError) -> ServingError:
    """The error behind a `grpc.aio.AioRpcError`, or behind what a synchronous call raises."""
    call: Any = error
    return error_from_status(call.code(), call.details(), call.trailing_metadata())
