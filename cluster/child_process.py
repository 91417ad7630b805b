"""A child process that is started again when it dies, and stopped by its number."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.tasks import cancel_and_wait

log = logging.getLogger(__name__)

SETTLED_AFTER_S = 10.0
QUICK_DEATHS_MAX = 3
"""A child that dies so often in a row, each time before it has settled, would die again."""


class SupervisedChild:
    """Runs `command` until `stop`. It has a session of its own: Ctrl-C at the terminal is for its parent."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        inherits: Sequence[int] = (),
        on_end: Callable[[], None] = lambda: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`inherits`: files of this process that are also the child's, by the same numbers. `on_end` is called when it
        has ended by itself, before it is started again."""
        self._name = name
        self._command = command
        self._inherits = inherits
        self._on_end = on_end
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why it is not started again any more; None while it runs or is being started."""
        return self._failure

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        await self._launch()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch {self._name}")

    async def stop(self, *, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL after so long. Idempotent."""
        if self._watcher is not None:
            await cancel_and_wait(self._watcher)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, so that it is started again."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _launch(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, start_new_session=True, pass_fds=self._inherits
        )

    async def _watch(self) -> None:
        quick_deaths = 0
        while True:
            assert self._process is not None
            started_s = self._clock.monotonic_s()
            code = await self._process.wait()
            self._on_end()
            quick_deaths = 0 if self._clock.monotonic_s() - started_s > SETTLED_AFTER_S else quick_deaths + 1
            if quick_deaths >= QUICK_DEATHS_MAX:
                self._failure = f"{self._name} ended with code {code}, {quick_deaths} times in a row"
                return
            log.error("%s ended and is started again", self._name, extra={"code": code})
            await self._launch()
