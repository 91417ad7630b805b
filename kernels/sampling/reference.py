"""The sampling head in plain torch: whole rows are sorted, and all noise is float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import Edits, Limits, Noise

_MASK = 0xFFFFFFFF


def apply_edits(weights: Tensor, edits: Edits) -> None:
    rows, ids = edits.places
    bias, penalty, less = edits.factors
    values = weights[rows, ids] + bias
    weights[rows, ids] = torch.where(values > 0, values / penalty, values * penalty) - less


def apply_masks(weights: Tensor, rows: Tensor, words: Tensor) -> None:
    allowed = (words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    forbidden = allowed.flatten(1)[:, : weights.shape[1]] == 0
    weights[rows] = weights[rows].masked_fill(forbidden, -torch.inf)


def draw(weights: Tensor, temperatures: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    noisy = (temperatures > 0)[:, None]
    scaled = weights / torch.where(noisy[:, 0], temperatures, 1)[:, None]
    sums = scaled.double() + torch.where(noisy, gumbels(noise, weights.shape[1]), 0.0)
    return _first_of_best(sums)


def draw_kept(weights: Tensor, temperatures: Tensor, noise: Noise, limits: Limits) -> tuple[Tensor, Tensor]:
    weights /= temperatures[:, None]
    values, ids = torch.sort(weights, dim=1, descending=True, stable=True)
    masses = torch.exp(values.double() - values[:, :1])
    shares = masses.cumsum(1)
    wanted = limits.top_p[:, None] * shares.gather(1, limits.top_k[:, None] - 1)
    reaching = torch.where(limits.top_p < 1, (shares < wanted).sum(1) + 1, weights.shape[1])
    likely = (values >= (values[:, 0] + limits.log_min_p)[:, None]).sum(1)
    counts = torch.minimum(torch.minimum(limits.top_k, reaching), likely)
    kept = torch.arange(weights.shape[1], device=weights.device) < counts[:, None]
    sums = values.double() + gumbels(noise, weights.shape[1]).gather(1, ids)
    by_id = torch.empty_like(sums).scatter_(1, ids, sums.masked_fill(~kept, -torch.inf))
    return _first_of_best(by_id)


def log_sums(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits.double(), dim=1)


def gumbels(noise: Noise, lanes: int) -> Tensor:
    """[rows, lanes] float64 standard Gumbel noise, of Philox4x32-10 (`engine/noise.py`)."""
    blocks = torch.arange(-(-lanes // 4), device=noise.keys.device)[None, :].expand(len(noise.keys), -1)
    zeros = torch.zeros_like(blocks)
    words = _philox(noise.keys[:, None], (blocks, zeros + noise.positions[:, None], zeros, zeros))
    uniform = (torch.stack(words, dim=2).flatten(1)[:, :lanes].double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform))


def _philox(key: Tensor, counter: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """32-bit words, kept in int64; the high half of a product may come out signed."""
    low, high = key & _MASK, (key >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ low, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ high, p0 & _MASK
        low, high = (low + 0x9E3779B9) & _MASK, (high + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def _first_of_best(sums: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = sums.max(dim=1)
    return ids, ~best.isfinite()
