"""What one forward pass computes: rows of several sequences, and which of their state it may read and write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class ImageRows(NamedTuple):
    """Consecutive rows of a segment that lie in an image's span."""

    offset: int
    """Of the first of them within the segment."""
    rows: Tensor
    """[rows, D]: what stands in the place of their tokens' embeddings."""


class Segment(NamedTuple):
    """Consecutive rows of one sequence in one forward: a prompt chunk, replayed rows, or the rows of a decode step.

    A forward may hold at most one segment of a sequence. Rows of a segment see each other causally through the caches.
    """

    slot: int
    """Index into the window rings and the unfinished-group rings; owned by this sequence."""
    block_table: Sequence[int]
    """Block ids: position p lives in `block_table[p // block_tokens]`. Covers every position up to the last row."""
    start: int
    """Position of the first row."""
    token_ids: Sequence[int]
    """Ids of rows start, start + 1, …"""
    history: Sequence[int]
    """Ids of the up to `engram_max_ngram_size - 1` tokens before `start`, oldest first: the n-gram look-back."""
    floor: int = 0
    """max(0, L - K) of the request, 0 in mode `off`. The last KV source's attention and all above it runs on rows
    p >= floor only, and layers above it read no window row below it."""
    window_start: int = 0
    """No layer reads a window row below this position: the start of a bounded replay, else 0."""
    write_start: int = 0
    """Global KV and index keys of positions below this are already there and are not written (replayed rows)."""
    logits_start: int | None = None
    """Logits are returned for rows p >= max(logits_start, floor); None: for no row."""
    images: Sequence[ImageRows] = ()
    """Rows that lie in images, whose tokens are all the image token."""

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + len(self.token_ids)


def image_rows(spans: Iterable[tuple[int, Tensor]], *, start: int, end: int) -> tuple[ImageRows, ...]:
    """The parts of images in the rows `start` … `end - 1` of a sequence. `spans`: the position at which each image
    begins, and the rows of its whole span [tokens, D]."""
    found: list[ImageRows] = []
    for first, rows in spans:
        low, high = max(start, first), min(end, first + len(rows))
        if low < high:
            found.append(ImageRows(low - start, rows[low - first : high - first]))
    return tuple(found)
