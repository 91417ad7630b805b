"""How far long work is: a bar for a person who looks on; for a log, a line now and then, with rate and time left."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from typing import Final, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from .clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)

SAY_EVERY_S: Final = 10.0
BAR_AFTER_S: Final = 0.5
"""Shorter work shows no bar."""
MIB: Final = 1 << 20


class ProgressReport:
    """One piece of work, from the report's making to the end of its `with` block. `note` and `advance` may be called
    from any thread, and often.

    Work is counted in whatever the caller likes; `unit` names `unit_size` of it. A bar is drawn on `console` if that is
    a terminal; otherwise `say` is given a line every SAY_EVERY_S seconds. `finish` says how long all of it took.
    """

    def __init__(
        self,
        what: str,
        *,
        unit: str,
        unit_size: int = 1,
        total: float | None = None,
        say: Callable[[str], None] = log.info,
        console: Console | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._what = what
        self._unit = unit
        self._unit_size = unit_size
        self._total = total
        self._done = self._done_at_start = 0.0
        self._detail = ""
        self._say = say
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._started_s = self._said_s = clock.monotonic_s()
        self._lock = threading.Lock()
        self._shown = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def begin_at(self, done: float) -> None:
        """So much was done before: rates do not count it."""
        self._done = self._done_at_start = done

    def note(self, done: float, total: float | None = None, *, detail: str = "") -> None:
        """`done` of `total` is done; `detail` is shown beside it."""
        with self._lock:
            self._done, self._total, self._detail = done, total or self._total, detail
            self._tell()

    def advance(self, by: float = 1) -> None:
        with self._lock:
            self._done += by
            self._tell()

    def finish(self) -> None:
        """Say how much it was and how long it took."""
        self.__exit__()
        seconds = self._seconds()
        done = (self._done - self._done_at_start) / self._unit_size
        self._say(f"{self._what}: {_short(done)} {self._unit} in {seconds:.1f} s, {self._rate_and_detail(seconds)}")

    def describe(self) -> str:
        """One line of where it stands."""
        seconds = self._seconds()
        parts = [f"{self._what}: {self._counted()}", self._rate_and_detail(seconds)]
        rate = (self._done - self._done_at_start) / seconds if seconds > 0 else 0.0
        if self._total is not None:
            parts.append(f"{(self._total - self._done) / rate:.0f} s left" if rate > 0 else "time left unknown")
        return ", ".join(parts)

    def _tell(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._shown:
            if now_s - self._started_s >= BAR_AFTER_S:
                self._draw()
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            self._say(self.describe())

    def _draw(self) -> None:
        if self._bar is None:
            told = TextColumn("{task.fields[told]}")
            # Only what goes to the same terminal passes through it: rich would send a redirected stdout there, too.
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                told,
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._bar.add_task(escape(self._what), total=None, told="")
            self._bar.start()
        told = escape(f"{self._counted()}, {self._rate_and_detail(self._seconds())}")
        self._bar.update(self._bar.task_ids[0], completed=self._done, total=self._total, told=told)

    def _seconds(self) -> float:
        return self._clock.monotonic_s() - self._started_s

    def _counted(self) -> str:
        of = "" if self._total is None else f"/{_short(self._total / self._unit_size)}"
        return f"{_short(self._done / self._unit_size)}{of} {self._unit}"

    def _rate_and_detail(self, seconds: float) -> str:
        rate = (self._done - self._done_at_start) / self._unit_size / seconds if seconds > 0 else 0.0
        return f"{_short(rate)} {self._unit}/s" + (f", {self._detail}" if self._detail else "")


def _short(value: float) -> str:
    """Three digits or more, none behind the point that says nothing."""
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"
