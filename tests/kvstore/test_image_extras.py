from __future__ import annotations

import pytest

from whalepod.kvstore.image_extras import ImageSpan, image_extras


def span(start: int, tokens: int, content: bytes = b"cat") -> ImageSpan:
    return ImageSpan(content, start, tokens, "1")


@pytest.mark.parametrize(
    ("start", "tokens", "depths"),
    [(0, 16, {0}), (15, 1, {0}), (15, 2, {0, 1}), (16, 16, {1}), (5, 40, {0, 1, 2}), (5, 0, set())],
)
def test_an_image_marks_exactly_the_blocks_it_touches(start: int, tokens: int, depths: set[int]) -> None:
    assert set(image_extras([span(start, tokens)], block_tokens=16)) == depths


def test_a_block_tells_images_and_places_apart() -> None:
    extras = [
        image_extras([image], block_tokens=16)[0]
        for image in (span(0, 4), span(1, 4), span(0, 5), span(0, 4, b"dog"), ImageSpan(b"cat", 0, 4, "2"))
    ]
    assert len(set(extras)) == len(extras)


def test_the_order_in_which_spans_are_given_does_not_matter() -> None:
    spans = [span(0, 4), span(8, 4, b"dog")]
    assert image_extras(spans, block_tokens=16) == image_extras(spans[::-1], block_tokens=16)
