"""SIGTERM inside a Ray worker: told to the event loop of the actor, which drains.

Ray's main thread waits in C++ and runs no Python handler before the next call arrives, and no other thread may set one.
But Python's C handler writes to a wakeup descriptor at once, whatever thread the signal meets:

    main thread, before Ray's loop: install ─▶ pipe ◀─ SIGTERM, from C     event loop of the actor: calling_on_sigterm

`worker_process_setup_hook` of a Ray job names `install`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

INSTALL: Final = f"{__name__}.install"
"""What Ray is told to run in each worker as it starts."""

_READ_BYTES = 64
_pipe: tuple[int, int] | None = None


def install() -> None:
    """On the main thread, once for each process."""
    global _pipe  # noqa: PLW0603  as many as there are wakeup descriptors: one for each process
    import ray._private.utils  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    _pipe = os.pipe()
    for end in _pipe:
        os.set_blocking(end, False)
    signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # Ray would put its own handler over this one, which ends the process at the next call, in the middle of draining.
    ray._private.utils.set_sigterm_handler = lambda _: None


@contextmanager
def calling_on_sigterm(call: Callable[[], None]) -> Generator[None]:
    """Call on the running event loop when SIGTERM comes, or has come since `install`. Without `install`: never."""
    if _pipe is None:
        yield
        return
    read_end = _pipe[0]

    def read() -> None:
        if signal.SIGTERM in os.read(read_end, _READ_BYTES):
            call()

    loop = asyncio.get_running_loop()
    loop.add_reader(read_end, read)
    try:
        yield
    finally:
        loop.remove_reader(read_end)
