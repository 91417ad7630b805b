"""From the bytes of an HTTP request to a JSON object, or a truthful refusal."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from whalepod.core.errors import CancelledError, RequestError

from .http_errors import BodyTooLargeError, MediaTypeError

BODY_BYTES_MAX = 64 * 1024 * 1024
"""A prompt of 1,048,576 ids is about 7 MiB of JSON; as text, with escapes, several times that."""

PARSE_ON_LOOP_BYTES_MAX = 64 * 1024
"""Above this, parsing goes to a worker thread."""


async def read_json_object(request: Request, *, bytes_max: int) -> tuple[dict[str, Any], int]:
    """The body as a dict, and its length in bytes.

    Raises MediaTypeError, BodyTooLargeError, RequestError (not a JSON object), CancelledError (the client is gone).
    """
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(f"the body must be application/json, not {media_type or 'unspecified'}")
    body = await _read_body(request, bytes_max)
    if len(body) <= PARSE_ON_LOOP_BYTES_MAX:
        return parse_json_object(body), len(body)
    return await asyncio.to_thread(parse_json_object, body), len(body)


def parse_json_object(body: bytes | str) -> dict[str, Any]:
    """Raises RequestError on anything but a JSON object. NaN and Infinity are not JSON."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


async def _read_body(request: Request, bytes_max: int) -> bytes:
    too_large = BodyTooLargeError(f"the body is larger than {bytes_max} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the client went away while it was sending the body")
        body += message.get("body", b"")
        if len(body) > bytes_max:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
