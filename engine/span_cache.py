"""Rows of images that were made lately, by what they are made of: each made once, however many ask at a time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from torch import Tensor

from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError


class SpanCache:
    """Thread-safe. Holds at most `rows_max` rows, and forgets those first that were asked for longest ago. Who was
    given rows keeps them, whatever is forgotten here."""

    def __init__(self, rows_max: int, *, on_forget: Callable[[], None] = lambda: None) -> None:
        self._rows_max = rows_max
        self._on_forget = on_forget
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, Tensor] = OrderedDict()
        self._coming: dict[bytes, Future[Tensor]] = {}
        self.rows_held = 0

    def rows(self, key: bytes, make: Callable[[], Tensor], *, deadline: Deadline) -> Tensor:
        """[tokens, D]: what is held, what another caller is making, or what `make` makes now. Whoever waits for another
        meets its error too, except that the other has run out of time: then it makes them itself. Raises DeadlineError,
        and what `make` raises."""
        while True:
            with self._lock:
                held = self._held.get(key)
                if held is not None:
                    self._held.move_to_end(key)
                    return held
                coming = self._coming.get(key)
                mine = self._coming[key] = Future[Tensor]() if coming is None else coming
            if coming is None:
                return self._made(key, make, mine)
            try:
                return _waited_for(coming, deadline)
            except DeadlineError:
                if deadline.expired:
                    raise

    def _made(self, key: bytes, make: Callable[[], Tensor], mine: Future[Tensor]) -> Tensor:
        """What `make` makes, told to all who wait for `mine`."""
        try:
            made = make()
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            mine.set_exception(error)
            raise
        self._keep(key, made)
        mine.set_result(made)
        return made

    def _keep(self, key: bytes, made: Tensor) -> None:
        with self._lock:
            del self._coming[key]
            if len(made) > self._rows_max:
                return
            self._held[key] = made
            self.rows_held += len(made)
            while self.rows_held > self._rows_max:
                _, forgotten = self._held.popitem(last=False)
                self.rows_held -= len(forgotten)
                self._on_forget()


def _waited_for(coming: Future[Tensor], deadline: Deadline) -> Tensor:
    try:
        return coming.result(
            max(0.0, deadline.remaining_s()) if deadline.remaining_s() < threading.TIMEOUT_MAX else None
        )
    except FutureTimeoutError:
        raise DeadlineError("the request's deadline passed while an image was being encoded") from None
