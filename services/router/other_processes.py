"""The other processes of this router (`router.processes`): what an operator changes at one is changed at all of them.

operator ─▶ this process ─▶ its own table          each has one of its own, and clients come to any
                 └────────▶ the same request at the others' operators' ports, marked, so that it goes no further
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from starlette.requests import Request

from whalepod.core.errors import UnavailableError

RELAYED_HEADER = "x-whalepod-relayed"
KEY_HEADERS = ("authorization", "x-api-key")
PATIENCE_S = 3.0


async def tell_others(
    urls: Sequence[str], request: Request, path: str, *, body: Mapping[str, Any] | None = None
) -> None:
    """Ask of the processes at `urls` what `request` asks of this one, with the same key. Raises UnavailableError, which
    names those that have not done it."""
    if not urls or RELAYED_HEADER in request.headers:
        return
    headers = {name: request.headers[name] for name in KEY_HEADERS if name in request.headers} | {RELAYED_HEADER: "1"}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S, headers=headers) as client:
        asking = (client.request(request.method, url + path, json=body) for url in urls)
        answers = await asyncio.gather(*asking, return_exceptions=True)
    refused = [url for url, answer in zip(urls, answers, strict=True) if not _is_done(answer)]
    if refused:
        raise UnavailableError(f"done here, but not at {', '.join(refused)} (router.processes): ask again")


def _is_done(answer: httpx.Response | BaseException) -> bool:
    if isinstance(answer, BaseException) and not isinstance(answer, httpx.HTTPError):
        raise answer
    return isinstance(answer, httpx.Response) and answer.is_success
