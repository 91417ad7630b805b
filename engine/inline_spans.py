"""Images encoded in the process that computes their text, where no rank does it for others."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from whalepod.core.clock import Deadline
from whalepod.model.checkpoint import holds_vision
from whalepod.model.vision.encoder import VisionEncoder
from whalepod.model.vision.pixels import patches_of_bytes

from .images import RequestImage
from .rank_model import RankModel
from .span_cache import SpanCache

ROWS_HELD_MAX = 16_384
"""Of a process that encodes for itself: 16 images of the longest spans."""


class InlineSpans:
    """A SpanSource."""

    def __init__(self, encoder: VisionEncoder, *, rows_max: int = ROWS_HELD_MAX) -> None:
        self._encoder = encoder
        self._one_at_a_time = threading.Lock()
        self._cache = SpanCache(rows_max)

    def rows(self, image: RequestImage, *, encoders: Sequence[str], deadline: Deadline) -> Tensor:
        """[tokens, D]. Asks nobody. Raises InvalidFieldError on bytes that are no image, DeadlineError."""
        del encoders
        return self._cache.rows(image.rows_name, lambda: self._encode(image), deadline=deadline)

    def _encode(self, image: RequestImage) -> Tensor:
        patches = patches_of_bytes(image.data, self._encoder.config)
        with self._one_at_a_time:
            return self._encoder.encode([patches])[0]


def inline_spans(model_dir: Path | str, model: RankModel) -> InlineSpans | None:
    """For a rank of `model`, in its arithmetic; reads the encoder's weights. None: the model sees no images, or its
    checkpoint holds the text model alone. Raises CheckpointError."""
    if not holds_vision(model_dir, model.config):
        return None
    return InlineSpans(VisionEncoder.load(model_dir, dtype=model.dtype, device=model.network.device))
