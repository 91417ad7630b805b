"""Reads a streamed answer of the HTTP API, and tells an answer that ended from one that broke off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from whalepod.core.errors import RequestError, ServingError, UnavailableError, WorkerLostError

CONNECT_TIMEOUT_S = 5.0


def stream_chunks(url: str, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of POST `path`, asked for with `stream`.

    Raises UnavailableError (nobody there, no room), RequestError (refused), WorkerLostError (it broke off).
    """
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    try:
        with (
            httpx.Client(base_url=url, timeout=timeout, trust_env=False) as client,
            client.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read().decode(errors="replace"))
            yield from _chunks(response.iter_lines())
    except httpx.TransportError as error:
        raise UnavailableError(f"{url} does not answer: {error}") from None


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        if data == line:
            continue  # the empty lines between events
        chunk = json.loads(data)
        if "error" in chunk:
            raise WorkerLostError(chunk["error"]["message"])
        yield chunk
    raise WorkerLostError("the answer broke off")


def _refusal(status: int, text: str) -> ServingError:
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text[:500] or f"status {status}"
    return UnavailableError(message) if status == 429 or status >= 500 else RequestError(message)
