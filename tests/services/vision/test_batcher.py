"""Which images are encoded together, and that nobody pays for another's."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from whalepod.core.clock import Deadline
from whalepod.core.errors import DeadlineError, InternalError, WorkerLostError
from whalepod.model.vision.grid import ImageGrid
from whalepod.model.vision.pixels import Patches
from whalepod.services.vision.batcher import Batcher, Waiting, next_batch


def image(patches: int) -> Patches:
    return Patches(torch.full((patches, 3, 4, 4), float(patches)), ImageGrid(4 * patches, 4, 1, patches, 1, patches))


def sizes(batch: Sequence[Waiting]) -> list[int]:
    return [one.patches.grid.patches for one in batch]


@pytest.mark.parametrize(
    ("waiting", "patches_max", "batch"),
    [
        ([100], 1000, [100]),
        ([5000], 1000, [5000]),
        ([100, 900, 90, 110, 500], 400, [100, 90, 110]),
        ([900, 100, 90], 1000, [900, 100]),
        ([10, 10, 10, 10], 30, [10, 10, 10]),
    ],
)
def test_a_batch_is_the_oldest_and_those_most_like_it(waiting: list[int], patches_max: int, batch: list[int]) -> None:
    queue = [Waiting(image(count), Deadline.after(60)) for count in waiting]
    assert sizes(next_batch(queue, patches_max=patches_max)) == batch


class Encoder:
    """Rows that tell the image. Waits at the gate, and breaks at one size."""

    def __init__(self, *, breaks_at: int = 0) -> None:
        self.batches: list[list[int]] = []
        self.gate = threading.Event()
        self._breaks_at = breaks_at

    def __call__(self, images: Sequence[Patches]) -> Sequence[Tensor]:
        assert self.gate.wait(10)
        counts = [one.grid.patches for one in images]
        self.batches.append(counts)
        if self._breaks_at in counts:
            raise ValueError("this one cannot be encoded")
        return [torch.full((count, 2), float(count)) for count in counts]


def test_images_that_wait_are_encoded_together_and_one_that_breaks_fails_alone() -> None:
    encoder = Encoder(breaks_at=7)
    batcher = Batcher(encoder, patches_max=100)
    batcher.start()
    first = batcher.submit(image(50), deadline=Deadline.after(60))
    while batcher.waiting:  # taken, and at the gate
        threading.Event().wait(0.001)
    others = [batcher.submit(image(count), deadline=Deadline.after(60)) for count in (6, 7, 8)]
    encoder.gate.set()
    assert float(first.result(10)[0, 0]) == 50
    assert float(others[0].result(10)[0, 0]) == 6
    assert float(others[2].result(10)[0, 0]) == 8
    with pytest.raises(InternalError):
        others[1].result(10)
    assert encoder.batches == [[50], [6, 7, 8], [6], [7], [8]]
    batcher.stop()


def test_what_comes_too_late_is_not_encoded_and_a_rank_that_stops_says_so() -> None:
    encoder = Encoder()
    batcher = Batcher(encoder, patches_max=100)
    late = batcher.submit(image(9), deadline=Deadline.after(0))
    waiting = [batcher.submit(image(1), deadline=Deadline.after(60)) for _ in range(2)]
    batcher.start()
    encoder.gate.set()
    assert all(len(one.result(10)) == 1 for one in waiting)
    with pytest.raises(DeadlineError):
        late.result(10)
    assert encoder.batches == [[1, 1]]
    batcher.stop()
    with pytest.raises(WorkerLostError):
        batcher.submit(image(1), deadline=Deadline.after(60))
