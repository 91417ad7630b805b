"""How large an image is encoded, and how many tokens it takes (`model.md` §8.1). Integers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from whalepod.model.config import VisionConfig


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image as the tower sees it."""

    width: int
    """Pixels, a multiple of the patch size."""
    height: int
    patch_rows: int
    patch_columns: int
    rows: int
    """Of tokens: cells of `downsample_ratio` × `downsample_ratio` patches, the last ones perhaps padded."""
    columns: int

    @property
    def patches(self) -> int:
        return self.patch_rows * self.patch_columns

    @property
    def tokens(self) -> int:
        """Of the whole span: a newline after each row, and a delimiter at either end."""
        return self.rows * (self.columns + 1) + 2

    @classmethod
    def fit(cls, width: int, height: int, config: VisionConfig) -> Self:
        """The grid of an image of `width` × `height` pixels, both at least 1: enlarged to `min_pixels`, reduced until
        its span has at most `max_image_tokens`."""
        assert width > 0 and height > 0, (width, height)
        patch, cell = config.patch_size, config.patch_size * config.downsample_ratio
        if config.max_wh_ratio is not None:
            width = min(width, int(height * config.max_wh_ratio))
        if width * height < config.min_pixels:
            scale = math.sqrt(config.min_pixels / (width * height))
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        grid = cls._of(-(-width // patch) * patch, -(-height // patch) * patch, config)
        if grid.tokens <= config.max_image_tokens:
            return grid
        # Cells across and down, as fractions: rows · (columns + 1) + 2 = the most that is allowed, in this shape.
        ratio = height / width
        across = math.sqrt((config.max_image_tokens - 2) / ratio + 0.25) - 0.5
        down = across * ratio
        if across < 1:
            return cls._of(cell, (config.max_image_tokens - 2) // 2 * cell, config)
        if down < 1:
            return cls._of((config.max_image_tokens - 3) * cell, cell, config)
        scale = min(math.floor(across) * cell / width, math.floor(down) * cell / height)
        return cls._of(int(width * scale / patch) * patch, int(height * scale / patch) * patch, config)

    @classmethod
    def _of(cls, width: int, height: int, config: VisionConfig) -> Self:
        patch_columns, patch_rows = width // config.patch_size, height // config.patch_size
        ratio = config.downsample_ratio
        return cls(width, height, patch_rows, patch_columns, -(-patch_rows // ratio), -(-patch_columns // ratio))
