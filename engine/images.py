"""Images of a request: where their spans lie, and what the names of blocks say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from whalepod.kvstore.image_extras import ImageSpan, image_extras
from whalepod.model.vision.preparation import PROCESSOR_VERSION, PlacedImage


@dataclass(frozen=True, slots=True)
class RequestImage:
    """One image of a prompt, made ready for the model. Whoever computes rows of its span needs its embeddings."""

    start: int
    """Position of its span's first token."""
    tokens: int
    content_hash: bytes
    """32 bytes: equal ones have equal embeddings (`model/vision/preparation.py`)."""
    data: bytes
    width: int
    height: int

    @classmethod
    def of(cls, placed: PlacedImage) -> Self:
        image = placed.image
        return cls(placed.start, image.tokens, image.content_hash, image.data, image.width, image.height)

    @property
    def end(self) -> int:
        """Position after its span."""
        return self.start + self.tokens


def block_extras(images: Sequence[RequestImage], *, block_tokens: int) -> dict[int, bytes]:
    """By depth: what the names of the blocks that images touch are made of, beside their tokens."""
    spans = [ImageSpan(image.content_hash, image.start, image.tokens, PROCESSOR_VERSION) for image in images]
    return image_extras(spans, block_tokens=block_tokens)


def same_images(some: Sequence[RequestImage], others: Sequence[RequestImage]) -> bool:
    """Two prompts of the same ids have the same images."""
    return [(each.start, each.content_hash) for each in some] == [(each.start, each.content_hash) for each in others]
