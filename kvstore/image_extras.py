"""What an image adds to the names of the blocks it touches: all its positions share one token id (`kvstore.md` §2.2).

    extra = u32 count ‖ count × ( frame(content hash) ‖ i64 offset ‖ u32 tokens ‖ frame(processor version) )

Little-endian; spans in order of position; the offset is the span's first token relative to the block's, so it is
negative where an image began in an earlier block.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from whalepod.core.block_keys import frame


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The positions of one image in a prompt."""

    content_hash: bytes
    """Over the *preprocessed* pixels."""
    start: int
    tokens: int
    processor_version: str


def image_extras(spans: Sequence[ImageSpan], *, block_tokens: int) -> dict[int, bytes]:
    """The `extras` of `core.block_keys.derive_block_hashes`: by depth, for the blocks that a span touches."""
    touching: dict[int, list[ImageSpan]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        if span.tokens:
            for depth in range(span.start // block_tokens, (span.start + span.tokens - 1) // block_tokens + 1):
                touching[depth].append(span)
    return {depth: _extra(touched, depth * block_tokens) for depth, touched in touching.items()}


def _extra(spans: Sequence[ImageSpan], block_start: int) -> bytes:
    encoded = struct.pack("<I", len(spans))
    for span in spans:
        place = struct.pack("<qI", span.start - block_start, span.tokens)
        encoded += frame(span.content_hash) + place + frame(span.processor_version.encode())
    return encoded
