"""The vision transformer: patches of images in, one feature vector a patch out (`model.md` §8.2).

Rows of all images of a batch go through matrix products together, in tiles; attention is each image's own. So an
image's features have the same bits in any batch (`kernels/numerics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.linear import linear
from whalepod.kernels.numerics import narrow, wide_dtype, widen
from whalepod.kernels.rms_norm import rms_norm
from whalepod.model.config import VisionConfig
from whalepod.model.projection import Weights

from .grid import ImageGrid
from .pixels import Patches

NORM_EPS = 1e-6
"""Of every norm of the tower; the text network's is another."""

Recorder = Callable[[str, Tensor], None]
"""Called with a name (`vit_block0`) and the rows of the whole batch."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix product and a constant."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def from_weights(cls, weights: Weights, name: str) -> Self:
        return cls(weights[f"{name}.weight"], weights[f"{name}.bias"])

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        return linear(x, self.weight) + self.bias


@dataclass(frozen=True, slots=True)
class Angles:
    """Of the patches of a batch, in two dimensions: the first half of the pairs turns with the row, the second with the
    column; pair c is channels c and c + half."""

    cos: Tensor
    """[rows, 1, head width / 2]"""
    sin: Tensor

    @classmethod
    def of(cls, grids: Sequence[ImageGrid], config: VisionConfig, *, dtype: torch.dtype, device: torch.device) -> Self:
        pairs = config.hidden_size // config.num_attention_heads // 2  # row pairs and column pairs together
        exponents = torch.arange(0, pairs, 2, dtype=torch.float32) / pairs
        frequencies = 1.0 / config.rope_theta**exponents
        parts = [
            torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=1)
            for row, column in (_places(grid) for grid in grids)
        ]
        angles = torch.cat(parts).to(device=device, dtype=dtype)[:, None]
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """x [rows, heads, head width]"""
        wide = widen(x)
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin), dim=-1)
        return narrow(turned, x.dtype)


def _places(grid: ImageGrid) -> tuple[Tensor, Tensor]:
    """Row and column of every patch, as floats."""
    index = torch.arange(grid.patches)
    return (index // grid.patch_columns).float(), (index % grid.patch_columns).float()


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: Tensor
    qkv: Affine
    out: Affine
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 · inner, width], the gate first."""
    down: Tensor
    heads: int

    @classmethod
    def from_weights(cls, weights: Weights, config: VisionConfig) -> Self:
        """`weights` below `vision.blocks.{i}.`."""
        return cls(
            attention_norm=weights["norm1.weight"],
            qkv=Affine.from_weights(weights, "attn.wqkv"),
            out=Affine.from_weights(weights, "attn.wo"),
            mlp_norm=weights["norm2.weight"],
            gate_up=weights["mlp.w1.weight"],
            down=weights["mlp.w2.weight"],
            heads=config.num_attention_heads,
        )

    def __call__(self, x: Tensor, angles: Angles, bounds: Sequence[int]) -> Tensor:
        """x [rows, width], image after image; `bounds`: where each begins, and the end."""
        x = x + self.out(self._attend(rms_norm(x, self.attention_norm, eps=NORM_EPS), angles, bounds))
        gate, up = linear(rms_norm(x, self.mlp_norm, eps=NORM_EPS), self.gate_up).chunk(2, dim=-1)
        return x + linear(functional.silu(gate) * up, self.down)

    def _attend(self, x: Tensor, angles: Angles, bounds: Sequence[int]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, self.heads, -1).unbind(dim=1)
        q, k = angles.rotate(q), angles.rotate(k)
        out = torch.empty_like(x)
        for start, end in pairwise(bounds):
            # Copies of their own: where a tensor begins decides how a library sums it.
            query, key, value = (part[start:end].transpose(0, 1).contiguous()[None] for part in (q, k, v))
            seen = functional.scaled_dot_product_attention(query, key, value)[0]
            out[start:end] = seen.transpose(0, 1).reshape(end - start, -1)
        return out


@dataclass(frozen=True, slots=True)
class VisionTower:
    patch_embed: Affine
    blocks: tuple[Block, ...]
    norm: Tensor
    config: VisionConfig

    @classmethod
    def from_weights(cls, weights: Weights, config: VisionConfig) -> Self:
        """`weights` below `vision.`."""
        return cls(
            patch_embed=Affine.from_weights(weights, "patch_embed.proj"),
            blocks=tuple(
                Block.from_weights(weights.below(f"blocks.{block}."), config)
                for block in range(config.num_hidden_layers)
            ),
            norm=weights["norm.weight"],
            config=config,
        )

    def __call__(self, images: Sequence[Patches], *, recorder: Recorder | None = None) -> list[Tensor]:
        """[patches, width] of each image."""
        weight = self.patch_embed.weight
        rows = torch.cat([image.values for image in images]).flatten(1).to(weight)
        bounds = [0]
        for image in images:
            bounds.append(bounds[-1] + image.grid.patches)
        dtype = wide_dtype(weight.dtype)
        angles = Angles.of([image.grid for image in images], self.config, dtype=dtype, device=weight.device)
        x = self.patch_embed(rows)
        for number, block in enumerate(self.blocks):
            x = block(x, angles, bounds)
            if recorder is not None:
                recorder(f"vit_block{number}", x)
        x = rms_norm(x, self.norm, eps=NORM_EPS)
        if recorder is not None:
            recorder("vit_out", x)
        return [x[start:end] for start, end in pairwise(bounds)]
