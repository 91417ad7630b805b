"""Which attempt of a request is the newest a rank has heard of. An older one never touches what a newer one owns, and
none is worked on twice: a ticket is for one use, also across a restart of the rank."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from whalepod.core.errors import StaleAttemptError, UnavailableError
from whalepod.core.ids import RequestId

REMEMBERED_MAX = 65_536
"""Requests whose attempts are remembered, newest first."""


class _Newest(NamedTuple):
    attempt: int
    signed_unix_ms: int


class AttemptFence:
    """Remembers attempts past the end of a request, because messages of an old attempt may arrive after that. What was
    signed before anything it remembers it refuses: a new ticket is worth trying."""

    def __init__(self, *, since_unix_ms: int, remembered_max: int = REMEMBERED_MAX) -> None:
        """`since_unix_ms`: tickets signed before then may have been used up by this rank before it was started."""
        self._newest: OrderedDict[RequestId, _Newest] = OrderedDict()
        self._remembered_max = remembered_max
        self._since_unix_ms = since_unix_ms

    def admit_or_raise(self, request_id: RequestId, attempt: int, *, signed_unix_ms: int) -> None:
        """Note that `attempt` has come. `signed_unix_ms` 0: its router does not say.

        Raises StaleAttemptError if it, or a newer one, has come before, UnavailableError if that cannot be known.
        """
        newest = self._newest.get(request_id)
        if newest is not None and attempt <= newest.attempt:
            raise StaleAttemptError(f"attempt {attempt} of this request came after attempt {newest.attempt}")
        if 0 < signed_unix_ms < self._since_unix_ms:
            raise UnavailableError("the ticket was signed before all that this rank remembers")
        self._newest[request_id] = _Newest(attempt, signed_unix_ms)
        self._newest.move_to_end(request_id)
        if len(self._newest) > self._remembered_max:
            forgotten = self._newest.popitem(last=False)[1]
            self._since_unix_ms = max(self._since_unix_ms, forgotten.signed_unix_ms + 1)
