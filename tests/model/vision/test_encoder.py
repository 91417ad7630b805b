"""The vision encoder: what a span holds, and that no image depends on its neighbours."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.model.network_world import CHECKPOINT
from whalepod.core.errors import ConfigError, InvalidFieldError
from whalepod.kernels.numerics import whole_batches
from whalepod.model.checkpoint import holds_vision, load_vision_tensors
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import tensor_specs
from whalepod.model.vision.encoder import VisionEncoder
from whalepod.model.vision.grid import ImageGrid
from whalepod.model.vision.pixels import Patches, patches_of_bytes, patches_of_rgb


@lru_cache
def encoder() -> VisionEncoder:
    return VisionEncoder.load(CHECKPOINT)


def picture(width: int, height: int, *, seed: int = 0) -> Patches:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return patches_of_rgb(pixels, encoder().config)


SIZES = [(40, 40), (5, 9), (64, 64), (100, 31), (400, 5), (5, 400), (23, 37)]


@pytest.mark.parametrize("whole", [False, True])
def test_an_image_has_the_same_bits_alone_and_in_any_batch(whole: bool) -> None:
    images = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
    with whole_batches(whole):  # what a rank does for `fast` requests is no matter of the encoder's
        together = encoder().encode(images)
        turned = encoder().encode(images[::-1])[::-1]
    for image, one, other in zip(images, together, turned, strict=True):
        (alone,) = encoder().encode([image])
        assert torch.equal(alone, one)
        assert torch.equal(alone, other)


def test_a_span_is_a_start_lines_and_an_end() -> None:
    image = picture(64, 31)
    (span,), (rows,) = encoder().encode([image]), encoder().embeddings([image])
    tensors = load_vision_tensors(CHECKPOINT, ModelConfig.from_dir(CHECKPOINT), dtype=torch.float32)
    grid = image.grid
    assert len(span) == grid.tokens
    assert torch.equal(span[0], tensors["image_start"])
    assert torch.equal(span[-1], tensors["image_end"])
    lines = span[1:-1].view(grid.rows, grid.columns + 1, -1)
    assert torch.equal(lines[:, :-1].flatten(0, 1), rows)
    assert bool((lines[:, -1] == tensors["image_newline"]).all())


def test_the_role_reads_the_vision_tensors_and_no_other() -> None:
    config = ModelConfig.from_dir(CHECKPOINT)
    read = load_vision_tensors(CHECKPOINT, config)
    vision = {s.name for s in tensor_specs(config) if s.name.startswith(("vision.", "aligner.", "image_"))}
    assert read.keys() == vision


def test_a_checkpoint_may_hold_the_text_model_alone(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(CHECKPOINT)
    text = {name: tensor for name, tensor in load_file(CHECKPOINT / "model.safetensors").items() if "layers" in name}
    save_file(text, tmp_path / "model.safetensors")
    assert not holds_vision(tmp_path, config)
    assert holds_vision(CHECKPOINT, config)


def test_a_model_that_sees_no_images_is_refused() -> None:
    config = ModelConfig.from_dir(CHECKPOINT)
    object.__setattr__(config, "vision_config", None)
    with pytest.raises(ConfigError, match="vision_config"):
        VisionEncoder(config, {})


def test_bytes_become_the_patches_of_their_pixels() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (16, 28, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    patches = patches_of_bytes(held.getvalue(), encoder().config)
    assert patches.grid == ImageGrid.fit(28, 16, encoder().config)
    corner = torch.from_numpy(pixels[4:8, 8:12]).permute(2, 0, 1).float()
    assert torch.equal(patches.values[patches.grid.patch_columns + 2], ((corner / 255 - 0.5) / 0.5).bfloat16())


@pytest.mark.parametrize("data", [b"", b"RIFF", b"RIFF\x10\x00\x00\x00WEBPVP8 " + bytes(40), b"GIF89a" + bytes(40)])
def test_bytes_that_are_no_image_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="cannot be decoded") as refused:
        patches_of_bytes(data, encoder().config)
    assert refused.value.field == "image"
