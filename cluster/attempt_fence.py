"""Which attempt of a request is the newest a rank has heard of. An older one never touches what a newer one owns."""

from __future__ import annotations

from collections import OrderedDict

from whalepod.core.errors import StaleAttemptError
from whalepod.core.ids import RequestId

REMEMBERED_MAX = 65_536
"""Requests whose attempts are remembered, newest first. A message older than so many requests has expired anyway."""


class AttemptFence:
    """Remembers attempts past the end of a request, because messages of an old attempt may arrive after that."""

    def __init__(self, *, remembered_max: int = REMEMBERED_MAX) -> None:
        self._newest: OrderedDict[RequestId, int] = OrderedDict()
        self._remembered_max = remembered_max

    def admit_or_raise(self, request_id: RequestId, attempt: int) -> None:
        """Note that `attempt` has come. Raises StaleAttemptError if it, or a newer one, has come before."""
        newest = self._newest.get(request_id, 0)
        if attempt <= newest:
            raise StaleAttemptError(f"attempt {attempt} of this request came after attempt {newest}")
        self._newest[request_id] = attempt
        self._newest.move_to_end(request_id)
        if len(self._newest) > self._remembered_max:
            self._newest.popitem(last=False)
