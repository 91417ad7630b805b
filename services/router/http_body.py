"""From the bytes of an HTTP request to a JSON object, or a truthful refusal."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, NoReturn

from starlette.requests import Request

from whalepod.core.errors import CancelledError, InvalidFieldError, RequestError

from .http_errors import BodyTooLargeError, BodyTooSlowError, MediaTypeError
from .packed_ids import put_ids, with_packed_ids

BODY_BYTES_MAX = 64 * 1024 * 1024
"""A prompt of 1,048,576 ids is about 7 MiB of JSON; as text, with escapes, several times that."""

PARSE_ON_LOOP_BYTES_MAX = 64 * 1024
"""Above this, parsing goes to a worker thread."""

BODY_SECONDS_MAX = 60.0
"""How long a body may take to arrive."""

INTEGER_DIGITS_MAX = sys.get_int_max_str_digits() or sys.int_info.default_max_str_digits
"""Of an integer in a body."""

LENGTH_DIGITS_MAX = 18
"""Of a Content-Length that is looked at before the body comes. It is only the client's word: what comes is counted."""


async def read_json_object(request: Request, *, bytes_max: int, whole: bool = False) -> tuple[dict[str, Any], int]:
    """The body as a dict, and its length in bytes. `whole`: all of it has come already.

    A long `prompt` of token ids is an `array("I")` in it.

    Raises MediaTypeError, BodyTooLargeError, BodyTooSlowError, RequestError (not a JSON object), CancelledError (the
    client is gone).
    """
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(f"the body must be application/json, not {media_type or 'unspecified'}")
    body = await (_read_body(request, bytes_max) if whole else _read_body_in_time(request, bytes_max))
    if len(body) <= PARSE_ON_LOOP_BYTES_MAX:
        return parse_json_object(body), len(body)
    return await asyncio.to_thread(parse_large_object, body), len(body)


def parse_large_object(body: bytes) -> dict[str, Any]:
    """The same, letting other threads run in between. Raises RequestError."""
    packed = with_packed_ids(body)
    if packed is not None:
        rest, mark, ids = packed
        value = put_ids(parse_json_object(rest), mark, ids)
        if value is not None:
            return value
    return parse_json_object(body)


def parse_json_object(body: bytes | str) -> dict[str, Any]:
    """Raises RequestError on anything but a JSON object, InvalidFieldError on an integer of too many digits. NaN and
    Infinity are not JSON."""
    text = ""
    try:
        text = body if isinstance(body, str) else body.decode(json.detect_encoding(body), "surrogatepass")
        value = _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        _refuse_long_integers(text)
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


async def _read_body_in_time(request: Request, bytes_max: int) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            return await _read_body(request, bytes_max)
    except TimeoutError:
        raise BodyTooSlowError(f"the body did not arrive within {BODY_SECONDS_MAX:g} seconds") from None


async def _read_body(request: Request, bytes_max: int) -> bytes:
    too_large = BodyTooLargeError(f"the body is larger than {bytes_max} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) <= LENGTH_DIGITS_MAX and int(declared) > bytes_max:
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


class _LongInteger:
    """Stands for an integer that the parser refuses without saying where it is: Python reads so many digits at most."""

    def __init__(self, digits: int) -> None:
        self.digits = digits


def _refuse_long_integers(text: str) -> None:
    """Raises InvalidFieldError, naming the first one's field, if that is all that is wrong with a text."""
    try:
        found = _JSON_OF_LONG_INTEGERS.decode(text)
    except (ValueError, RecursionError):
        return
    places: list[tuple[str, Any]] = [("", found)]
    while places:
        place, value = places.pop()
        if isinstance(value, _LongInteger) and place:
            where, field = place[1:], place[1:].partition(".")[0]
            raise InvalidFieldError(
                field, f"{where} is an integer of {value.digits} digits: write one of at most {INTEGER_DIGITS_MAX}"
            )
        if isinstance(value, dict):
            places += [(f"{place}.{name}", member) for name, member in reversed(value.items())]
        elif isinstance(value, list):
            places += [(f"{place}.{index}", member) for index, member in reversed(list(enumerate(value)))]


def _int_or_long(text: str) -> int | _LongInteger:
    digits = len(text.lstrip("-"))
    return int(text) if digits <= INTEGER_DIGITS_MAX else _LongInteger(digits)


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once: `json.loads` makes one for each body."""
_JSON_OF_LONG_INTEGERS = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_int_or_long)
"""Slow: it calls back for each integer."""
