"""The rows of images, brought to a rank's sequences while their text is being computed.

    restored ──▶ want: spans with rows to compute ──▶ SpanSource, on threads ──▶ SpanReady ──▶ complete ──▶ rows go on
                    ▲──── some at a time ────┘                  computed beyond a span ──▶ its rows are dropped

Text in front of the first image that is missing is computed meanwhile. A span is asked for only if rows of it are to be
computed: a prefix hit beyond it needs none, and a replay over it asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from whalepod.core.clock import Deadline
from whalepod.core.errors import InternalError, ServingError
from whalepod.core.ids import RequestId

from .images import RequestImage
from .sequence import Sequence as EngineSequence

SPANS_HELD_MAX = 16
"""Of one sequence, here or on their way: 160 MiB of the release's."""
THREADS = 8


class SpanSource(Protocol):
    """Where the rows of images come from. Called from several threads."""

    def rows(self, image: RequestImage, *, encoders: Sequence[str], deadline: Deadline) -> Tensor:
        """[tokens, D], on any device. `encoders`: addresses of vision ranks that may be asked, the best first. Raises
        ServingError."""
        ...


@dataclass(frozen=True, slots=True)
class SpanReady:
    """What came of fetching one image."""

    request_id: RequestId
    attempt: int
    content_hash: bytes
    rows: Tensor | ServingError


class SpanLoader:
    """Belongs to the engine's thread, but for what runs on its own threads."""

    def __init__(self, source: SpanSource, deliver: Callable[[SpanReady], None]) -> None:
        self._source = source
        self._deliver = deliver
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine-images")

    def want(self, sequence: EngineSequence) -> None:
        """Drop what the sequence needs no more, and ask for what it needs next."""
        for start in [start for start, rows in sequence.spans.items() if start + len(rows) <= sequence.computed]:
            del sequence.spans[start]
        needed = [image for image in sequence.request.images if image.end > sequence.computed]
        for image in needed[:SPANS_HELD_MAX]:
            if image.start not in sequence.spans and image.content_hash not in sequence.spans_coming:
                sequence.spans_coming.add(image.content_hash)
                self._threads.submit(self._fetch, sequence, image)

    def complete(self, sequence: EngineSequence, ready: SpanReady) -> ServingError | None:
        """An answer for a live sequence. What it says is wrong, if so."""
        sequence.spans_coming.discard(ready.content_hash)
        if isinstance(ready.rows, ServingError):
            return ready.rows
        for image in sequence.request.images:
            if image.content_hash == ready.content_hash and image.end > sequence.computed:
                if len(ready.rows) != image.tokens:
                    return InternalError(f"an image of {image.tokens} tokens has {len(ready.rows)} rows")
                sequence.spans[image.start] = ready.rows
        return None

    def close(self) -> None:
        """What has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, sequence: EngineSequence, image: RequestImage) -> None:
        """On a thread of its own. Of the sequence, only what never changes is looked at, and whether it has ended."""
        request = sequence.request
        if sequence.ended:
            return
        try:
            rows: Tensor | ServingError = self._source.rows(
                image, encoders=request.vision_ranks, deadline=request.deadline
            )
        except ServingError as error:
            rows = error
        except Exception as error:  # noqa: BLE001  whatever it is, the request that waits for it must end
            rows = InternalError(f"the rows of an image could not be fetched: {error!r}")
        self._deliver(SpanReady(request.request_id, request.attempt, image.content_hash, rows))
