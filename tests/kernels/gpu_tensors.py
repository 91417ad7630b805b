"""Seeded tensors of the released model's sizes on a GPU, for tests that run there."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTH, KEY_WIDTH, PAIRS, HIDDEN = 512, 128, 32, 5120
BF16 = 4e-3
"""Relative norm that rounding results to bfloat16 explains."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator)


def bf16(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).bfloat16()


def angles(rows: int) -> tuple[Tensor, Tensor]:
    turned = draw(rows, PAIRS, seed=99) * 6
    return turned.cos(), turned.sin()


def assert_close(ours: Tensor, wanted: Tensor, tolerance: float = BF16) -> None:
    difference = (ours.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
    assert float(difference) <= tolerance, float(difference)
