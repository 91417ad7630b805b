"""Images that are encoded together: of those that wait, the oldest and those most like it in size.

encode ─▶ queue ─▶ one thread: a batch of at most so many patches ─▶ encoder ─▶ rows of each

An image's rows do not depend on its batch, so this decides how fast it goes and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from prometheus_client import Histogram
from torch import Tensor

from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError, InternalError, WorkerLostError
from whalepod.model.vision.pixels import Patches

log = logging.getLogger(__name__)

BATCH_IMAGES = Histogram(
    "whalepod_vision_batch_images", "Images that were encoded together.", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
)
BATCH_SECONDS = Histogram(
    "whalepod_vision_batch_seconds",
    "Time of encoding one batch.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

Encode = Callable[[Sequence[Patches]], Sequence[Tensor]]


@dataclass(slots=True, eq=False)
class Waiting:
    patches: Patches
    deadline: Deadline
    rows: Future[Tensor] = field(default_factory=Future)


def next_batch(waiting: Sequence[Waiting], *, patches_max: int) -> list[Waiting]:
    """The oldest, and with it those nearest to its number of patches, while they fit. Pure."""
    oldest = waiting[0]
    wanted = oldest.patches.grid.patches
    batch, room = [oldest], patches_max - wanted
    for other in sorted(waiting[1:], key=lambda each: abs(each.patches.grid.patches - wanted)):
        if other.patches.grid.patches <= room:
            batch.append(other)
            room -= other.patches.grid.patches
    return batch


class Batcher:
    """Thread-safe. `start` and `stop` once."""

    def __init__(self, encode: Encode, *, patches_max: int) -> None:
        self._encode = encode
        self._patches_max = patches_max
        self._waiting: list[Waiting] = []
        self._changed = threading.Condition()
        self._stopped = False
        self.running = 0
        self._thread = threading.Thread(target=self._work, name="vision", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._thread.start()

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Whoever waits is told that the rank goes."""
        with self._changed:
            self._stopped = True
            left, self._waiting = self._waiting, []
            self._changed.notify_all()
        for one in left:
            one.rows.set_exception(WorkerLostError("this rank is stopping"))
        self._thread.join(timeout_s)

    def submit(self, patches: Patches, *, deadline: Deadline) -> Future[Tensor]:
        """[tokens, D], when it is its turn; DeadlineError if that comes too late. Raises WorkerLostError."""
        one = Waiting(patches, deadline)
        with self._changed:
            if self._stopped:
                raise WorkerLostError("this rank is stopping")
            self._waiting.append(one)
            self._changed.notify_all()
        return one.rows

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopped)
                if self._stopped:
                    return
                late = [one for one in self._waiting if one.deadline.expired]
                self._waiting = [one for one in self._waiting if one not in late]
                batch = next_batch(self._waiting, patches_max=self._patches_max) if self._waiting else []
                self._waiting = [one for one in self._waiting if one not in batch]
                self.running = len(batch)
            for one in late:
                one.rows.set_exception(DeadlineError("the call's deadline passed before its image was encoded"))
            if batch:
                self._run(batch)
            self.running = 0

    def _run(self, batch: Sequence[Waiting]) -> None:
        BATCH_IMAGES.observe(len(batch))
        try:
            with BATCH_SECONDS.time():
                made = self._encode([one.patches for one in batch])
        except Exception:
            log.exception("a batch of images could not be encoded", extra={"images": len(batch)})
            if len(batch) == 1:
                batch[0].rows.set_exception(InternalError("the vision encoder failed on this image"))
                return
            for one in batch:  # only those that cannot be encoded fail
                self._run([one])
            return
        for one, rows in zip(batch, made, strict=True):
            one.rows.set_result(rows)
