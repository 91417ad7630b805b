"""The vision encoder of one process: images in, the rows of their spans out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from whalepod.core.errors import ConfigError, InternalError
from whalepod.kernels.numerics import whole_batches
from whalepod.model.checkpoint import load_vision_tensors
from whalepod.model.config import ModelConfig
from whalepod.model.projection import Weights

from .aligner import Aligner
from .grid import ImageGrid
from .pixels import Patches
from .tower import Recorder, VisionTower


class VisionEncoder:
    """Holds weights only. An image's rows have the same bits alone and in any batch."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` by released name. Raises ConfigError if the model sees no images."""
        if config.vision_config is None:
            raise ConfigError("config.json has no vision_config: this model sees no images")
        weights = Weights(tensors)
        self.config = config.vision_config
        self._tower = VisionTower.from_weights(weights.below("vision."), config.vision_config)
        self._aligner = Aligner.from_weights(weights.below("aligner."), ratio=config.vision_config.downsample_ratio)
        self._start, self._end = weights["image_start"], weights["image_end"]
        self._newline = weights["image_newline"]

    @classmethod
    def load(
        cls, directory: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Self:
        """From a checkpoint directory, of which only the vision tensors are read. Raises ConfigError or
        CheckpointError."""
        config = ModelConfig.from_dir(directory)
        return cls(config, load_vision_tensors(directory, config, dtype=dtype, device=device))

    @property
    def dtype(self) -> torch.dtype:
        return self._start.dtype

    @torch.inference_mode()
    def encode(self, images: Sequence[Patches]) -> list[Tensor]:
        """[span tokens, D] of each image, on the encoder's device. Raises InternalError if one is no number."""
        embeddings = self.embeddings(images)
        if not all(bool(rows.isfinite().all()) for rows in embeddings):
            raise InternalError("the vision encoder made rows that are no numbers")
        return [self.span(rows, image.grid) for rows, image in zip(embeddings, images, strict=True)]

    @torch.inference_mode()
    def embeddings(self, images: Sequence[Patches], *, recorder: Recorder | None = None) -> list[Tensor]:
        """[rows · columns, D] of each image, in reading order."""
        with whole_batches(False):
            features = self._tower(images, recorder=recorder)
            return self._aligner(features, [image.grid for image in images])

    @torch.inference_mode()
    def span(self, embeddings: Tensor, grid: ImageGrid) -> Tensor:
        """embeddings [rows · columns, D] -> [tokens, D]: a start, each row and its newline, an end."""
        lines = torch.cat((embeddings.view(grid.rows, grid.columns, -1), self._newline.expand(grid.rows, 1, -1)), dim=1)
        return torch.cat((self._start[None], lines.flatten(0, 1), self._end[None]))
