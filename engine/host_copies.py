"""Records of the caches as bytes in host memory and back, beside the steps.

On a GPU they move on a stream of their own, through pinned memory, and no thread waits for it but the one that needs
the bytes:

    steps    ── step n ─┬────── step n + 1 ──────┬── step n + 2 ──▶
                   mark │                        │ waits for the pieces on the GPU alone
    copies              └─ gather ── to host ─ arrived
                           from host ── scatter ─┘

What a step has computed may be read once it is settled; a step that is on its way neither reads nor writes what is
copied meanwhile (`pipeline.py`), and those that are launched afterwards come after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.record_runs import RecordRun, gather_runs, runs_bytes, scatter_runs

Value = TypeVar("Value")
Made = TypeVar("Made")

Bytes = NDArray[np.uint8]
"""[bytes]"""
Mark = torch.cuda.Event | None
"""A place between steps. None: on a CPU, where they are done when they return."""


@dataclass(frozen=True, slots=True)
class Copied(Generic[Value]):
    """Something made of bytes that may still be on their way to `value`'s memory."""

    value: Value
    _arrived: torch.cuda.Event | None = None

    def wait(self) -> Value:
        """The value, with all its bytes there. On any thread; others run meanwhile."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self.value

    def made(self, make: Callable[[Value], Made]) -> Copied[Made]:
        """Something else made of the same bytes; `make` must not read them."""
        return Copied(make(self.value), self._arrived)


class HostCopies:
    """Of the caches on one device. `mark` is for the thread that launches steps, all else for the engine's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._settled: Mark = None
        self._sending: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def mark(self) -> Mark:
        """Where the steps are: behind the rows that were queued last."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self, mark: Mark) -> None:
        """The step of this mark is settled: from here on, what was computed up to it is read. Until the first call,
        everything that has been queued is waited for."""
        self._settled = mark

    def new_buffer(self, size_bytes: int) -> memoryview:
        """Memory for bytes that will be written to the caches: pinned, so that they need not be copied once more. On
        any thread."""
        return _view(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._stream is not None))

    def read(self, runs: Sequence[RecordRun]) -> Copied[memoryview]:
        """The bytes of these runs, one after the other."""
        if self._stream is None:
            return Copied(_view(gather_runs(runs)))
        with torch.cuda.stream(self._stream):
            self._await_settled(self._stream)
            gathered = gather_runs(runs)
            self._let_steps_follow(self._stream)
            host = torch.empty(len(gathered), dtype=torch.uint8, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record(self._stream)
        return Copied(_view(host), arrived)

    def write(self, runs: Sequence[RecordRun], pieces: Sequence[Bytes]) -> None:
        """Write the bytes of these runs: the pieces, one after the other. They are read, or held, before this
        returns."""
        if self._stream is None:
            scatter_runs(runs, torch.from_numpy(_joined(pieces)))
            return
        host, own = self._pinned(pieces, runs_bytes(runs))
        with torch.cuda.stream(self._stream):
            self._await_settled(self._stream)
            scatter_runs(runs, host.to(self._device, non_blocking=True))
            written = self._let_steps_follow(self._stream)
        while self._sending and self._sending[0][0].query():
            self._sending.popleft()
        if not own:
            self._sending.append((written, host))

    def _pinned(self, pieces: Sequence[Bytes], size_bytes: int) -> tuple[Tensor, bool]:
        """The pieces in pinned memory, and whether that is torch's, which knows how long it is read."""
        if len(pieces) == 1 and pieces[0].flags.writeable:
            given = torch.from_numpy(pieces[0])
            if given.is_pinned():
                return given, False
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        _join(pieces, host.numpy())
        return host, True

    def _await_settled(self, stream: torch.cuda.Stream) -> None:
        if self._settled is not None:
            stream.wait_event(self._settled)
        else:
            stream.wait_stream(torch.cuda.default_stream(self._device))

    def _let_steps_follow(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Whatever is launched from here on comes after what is queued on `stream`."""
        event = torch.cuda.Event()
        event.record(stream)
        torch.cuda.default_stream(self._device).wait_event(event)
        return event


def _view(data: Tensor) -> memoryview:
    return memoryview(data.numpy())  # pyright: ignore[reportArgumentType]  (numpy's stubs know no buffers before 3.12)


def _joined(pieces: Sequence[Bytes]) -> Bytes:
    if len(pieces) == 1 and pieces[0].flags.writeable:
        return pieces[0]
    joined = np.empty(sum(map(len, pieces)), dtype=np.uint8)
    _join(pieces, joined)
    return joined


def _join(pieces: Sequence[Bytes], joined: Bytes) -> None:
    start = 0
    for piece in pieces:
        joined[start : start + len(piece)] = piece
        start += len(piece)
