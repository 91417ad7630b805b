"""What operators may say about the ranks that one router uses: which there are, and who is to get no new work.

GET ─▶ the ranks      DELETE ─▶ a rank gets no new work here, what it has goes on      POST ─▶ it gets some again,
                                                                                     or there is one at an address
A router is all its processes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from whalepod.cluster.registration import RankInfo, RankRole
from whalepod.core.errors import InvalidFieldError, RequestError, ServingError

from .body_models import parse_body
from .http_body import read_json_object
from .http_errors import error_response, json_response, plain_error_response
from .other_processes import tell_others
from .rank_table import RankTable

BODY_BYTES_MAX = 4096


class WorkerBody(BaseModel):
    """One of them: `rank` as `GET /workers` names it, `address` as `host:port`."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    rank: str | None = None
    address: str | None = Field(default=None, pattern=r"^\S+:[0-9]+$")


class Workers:
    """The endpoints of `/workers`."""

    def __init__(
        self, table: RankTable, *, add_address: Callable[[str], Awaitable[None]] | None, others: Sequence[str] = ()
    ) -> None:
        """`add_address`: where ranks are found by address. None: they join by registering. `others`: where operators
        reach the other processes of this router."""
        self._table = table
        self._add_address = add_address
        self._others = others

    async def get(self, request: Request) -> Response:
        del request
        return self._answer()

    async def post(self, request: Request) -> Response:
        try:
            body = parse_body(WorkerBody, (await read_json_object(request, bytes_max=BODY_BYTES_MAX))[0])
            if (body.rank is None) == (body.address is None):
                raise RequestError("one of rank and address is needed")
            if body.address is not None:
                await self._add(body.address)
            elif (info := self._find(body.rank or "")) is not None:
                self._table.readmit(info)
            else:
                return _unknown(body.rank or "")
            await tell_others(self._others, request, "/workers", body=body.model_dump(exclude_none=True))
        except ServingError as error:
            return error_response(error)
        return self._answer()

    async def delete(self, request: Request) -> Response:
        name = request.path_params["rank"]
        info = self._find(name)
        if info is None:
            return _unknown(name)
        self._table.note_draining(info)
        try:
            await tell_others(self._others, request, f"/workers/{quote(name, safe='')}")
        except ServingError as error:
            return error_response(error)
        return self._answer()

    async def _add(self, address: str) -> None:
        """Raises InvalidFieldError where that is not how ranks are found."""
        if self._add_address is None:
            raise InvalidFieldError("address", "address: ranks join this router by registering; see router.decode")
        await self._add_address(address)

    def _find(self, name: str) -> RankInfo | None:
        return next((info for info in self._table.ranks.values() if name in (info.rank_id, info.address)), None)

    def _answer(self) -> Response:
        ranks = sorted(self._table.ranks.values(), key=lambda info: info.rank_id)
        return json_response({"workers": [self._worker(info) for info in ranks]})

    def _worker(self, info: RankInfo) -> dict[str, Any]:
        return {
            "rank": info.rank_id,
            "role": "decode" if info.role is RankRole.DECODE else info.role.value,
            "address": info.address,
            "draining": not self._table.takes_work(info),
            "running": info.load.running,
            "waiting": info.load.waiting,
            "context_tokens_max": info.context_tokens_max,
            "version": info.version,
        }


def _unknown(name: str) -> Response:
    return plain_error_response(404, f"there is no rank {name} here")
