"""Images of a request: where their spans lie, and what the names of blocks say of them."""

from __future__ import annotations

import hashlib
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
    salt: bytes = b""
    """Who shares its rows: those whose blocks have the same salt."""
    owner: int = 0
    """On whose account they are stored (`kvstore.store_keys.owner_tag`); 0: nobody's."""

    @classmethod
    def of(cls, placed: PlacedImage, *, salt: bytes = b"", owner: int = 0) -> Self:
        image = placed.image
        return cls(placed.start, image.tokens, image.content_hash, image.data, image.width, image.height, salt, owner)

    @property
    def rows_name(self) -> bytes:
        return rows_name(self.content_hash, salt=self.salt)

    @property
    def end(self) -> int:
        """Position after its span."""
        return self.start + self.tokens


def rows_name(image_hash: bytes, *, salt: bytes) -> bytes:
    """32 bytes that name an image's rows wherever they are held. What was encoded under another salt is not found, and
    serves nobody sooner."""
    return hashlib.sha256(b"whalepod rows" + image_hash + salt).digest()


def block_extras(images: Sequence[RequestImage], *, block_tokens: int) -> dict[int, bytes]:
    """By depth: what the names of the blocks that images touch are made of, beside their tokens."""
    spans = [ImageSpan(image.content_hash, image.start, image.tokens, PROCESSOR_VERSION) for image in images]
    return image_extras(spans, block_tokens=block_tokens)


def same_images(some: Sequence[RequestImage], others: Sequence[RequestImage]) -> bool:
    """Two prompts of the same ids have the same images."""
    return [(each.start, each.content_hash) for each in some] == [(each.start, each.content_hash) for each in others]
