"""Reads a streamed answer of the HTTP API, and tells an answer that ended from one that broke off."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from whalepod.core.errors import ConfigError, RequestError, ServingError, UnavailableError, WorkerLostError

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where a router listens, and what it wants to see."""

    url: str
    api_key: str | None = None
    ca_file: Path | None = None
    """Authorities that its certificate may be of; None: those of this machine."""

    def client(self) -> httpx.Client:
        """Raises ConfigError if `ca_file` cannot be used."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        try:
            trusted = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca-file {self.ca_file} cannot be used: {error}") from None
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False, verify=trusted)


def stream_chunks(server: Server, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of POST `path`, asked for with `stream`.

    Raises UnavailableError (nobody there, no room), RequestError (refused), WorkerLostError (it broke off).
    """
    try:
        with (
            server.client() as client,
            client.stream("POST", path, json={**body, "stream": True}) as response,
        ):
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read().decode(errors="replace"))
            yield from _chunks(response.iter_lines())
    except httpx.TransportError as error:
        raise UnavailableError(f"{server.url} does not answer: {error}") from None


def snapshots(server: Server, path: str) -> Iterator[dict[str, Any]]:
    """What GET `path` tells event by event, until the router leaves.

    Raises UnavailableError (nobody there, no room), RequestError (refused, for example without an operator's key).
    """
    try:
        with server.client() as client, client.stream("GET", path) as response:
            if response.status_code != 200:
                raise _refusal(response.status_code, response.read().decode(errors="replace"))
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
    except httpx.TransportError as error:
        raise UnavailableError(f"{server.url} does not answer: {error}") from None


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
