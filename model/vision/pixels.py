"""From an encoded image to the patches of its grid (`model.md` §8.1, steps 5 and 6)."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from whalepod.core.errors import InvalidFieldError
from whalepod.model.config import VisionConfig

from .grid import ImageGrid

PAD_COLOUR = (127, 127, 127)
PIXELS_MAX = 16 * 1024 * 1024
"""Of an image that was made ready for the model. The largest that fit 1024 tokens have 1.8 million."""


@dataclass(frozen=True, slots=True)
class Patches:
    """One image, ready for the tower."""

    values: Tensor
    """[patches, 3, patch, patch] bfloat16 in [-1, 1], row by row."""
    grid: ImageGrid


def patches_of_bytes(data: bytes, config: VisionConfig) -> Patches:
    """Of a WebP, PNG or JPEG. Raises InvalidFieldError naming `image` on bytes that are no such image."""
    try:
        with Image.open(io.BytesIO(data), formats=("WEBP", "PNG", "JPEG")) as opened:
            width, height = opened.size
            if width * height > PIXELS_MAX:
                raise InvalidFieldError("image", f"an image of {width} × {height} pixels was not made ready")
            image = opened.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidFieldError("image", f"the image cannot be decoded: {error}") from error
    return patches_of_image(image, config)


def patches_of_rgb(pixels: np.ndarray, config: VisionConfig) -> Patches:
    """pixels [height, width, 3] uint8."""
    return patches_of_image(Image.fromarray(pixels), config)


def patches_of_image(image: Image.Image, config: VisionConfig) -> Patches:
    """Of an RGB image: resized into its grid with its aspect kept, centred, the rest grey."""
    grid, patch = ImageGrid.fit(*image.size, config), config.patch_size
    if image.size != (grid.width, grid.height):
        image = ImageOps.pad(image, (grid.width, grid.height), color=PAD_COLOUR)
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).to(torch.float32)
    values = ((pixels / 255 - 0.5) / 0.5).to(torch.bfloat16)
    split = values.view(grid.patch_rows, patch, grid.patch_columns, patch, 3)
    return Patches(split.permute(0, 2, 4, 1, 3).reshape(grid.patches, 3, patch, patch), grid)
