"""POST /purge: what a tenant has stored is out of reach, at every router and rank, from the next look at Redis on.

The purge is a line in Redis (cluster/purge_epochs.py). Routers read it with the registry and give the tenant another
salt; the KV service removes what lies in the store.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from whalepod.core.errors import ForbiddenError, ServingError

from .body_models import parse_body
from .http_body import read_json_object
from .http_errors import error_response, json_response
from .tenancy import TENANT_CHARS_MAX

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 4096


class PurgeBody(BaseModel):
    """Whose stored prefixes and images are to go."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    tenant: str = Field(min_length=1, max_length=TENANT_CHARS_MAX)


class Purging:
    """`purge` writes a purge down; it raises UnavailableError if Redis does not answer."""

    def __init__(self, purge: Callable[[str], Awaitable[None]], *, keys_known: bool) -> None:
        """`keys_known`: there is a file of keys, so that whoever comes here has shown an operator's."""
        self._purge = purge
        self._keys_known = keys_known

    async def post(self, request: Request) -> Response:
        try:
            if not self._keys_known:
                raise ForbiddenError("a purge needs an operator's key, and router.api_keys_file names no file of keys")
            body = parse_body(PurgeBody, (await read_json_object(request, bytes_max=BODY_BYTES_MAX))[0])
            await self._purge(body.tenant)
        except ServingError as error:
            return error_response(error)
        log.warning("an operator purged a tenant", extra={"tenant": body.tenant})
        return json_response({"tenant": body.tenant, "purged": True})
