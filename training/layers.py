"""What every layer and draft block computes on rows: hyper-connections, norms, projections, experts.

The same operations as `whalepod.model` serves with, on whole batches and with gradients. Tensors keep the dtype of the
rows they come from; statistics, mixing coefficients and routing are at least float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import widen

from .compiling import compiled_on_gpu
from .rounding import window_rows
from .sinkhorn import sinkhorn

SUM_MIN = 1e-20
MAGNITUDE_MIN = 1e-6


class Mixes(NamedTuple):
    """Coefficients of one sublayer: `pre` [rows, S] is for the next one, `post` [rows, S] and `comb` [rows, S, S] for
    itself."""

    pre: Tensor
    post: Tensor
    comb: Tensor


class Routed(NamedTuple):
    output: Tensor
    """[rows, D]"""
    load: Tensor
    """[experts]: share of the rows that chose each expert."""
    imbalance: Tensor
    """Scalar: 1 if experts are equally likely and equally loaded."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = widen(x)
    return (wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., width], cos and sin [..., pairs] that broadcast: turns the last 2 · pairs channels, in pairs."""
    width = 2 * cos.shape[-1]
    first, second = widen(x[..., -width:]).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


@compiled_on_gpu
def collapsed(streams: Tensor, pre: Tensor, weight: Tensor, eps: float) -> Tensor:
    """streams [rows, S, D], pre [rows, S] -> the normalised input of a sublayer [rows, D]."""
    return rms_norm(collapse(streams, pre), weight, eps)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (widen(streams) * pre.unsqueeze(2)).sum(dim=1).to(streams.dtype)


@compiled_on_gpu
def _coefficients(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float) -> tuple[Tensor, Tensor]:
    """-> sigmoids of the first 2 · S coefficients, logits of the rest [rows, S · S]."""
    count = streams.shape[1]
    flat = widen(streams.flatten(1))
    values = functional.linear(flat, fn) * torch.rsqrt((flat * flat).mean(dim=1, keepdim=True) + rms_eps)
    spread = torch.cat((scale[0].expand(count), scale[1].expand(count), scale[2].expand(count * count)))
    values = values * spread + base
    return torch.sigmoid(values[:, : 2 * count]), values[:, 2 * count :]


def predict_mixes(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, *, rms_eps: float, eps: float, iterations: int
) -> Mixes:
    count = streams.shape[1]
    gates, logits = _coefficients(streams, fn, scale, base, rms_eps)
    comb = sinkhorn(logits.unflatten(1, (count, count)), eps=eps, iterations=iterations)
    return Mixes(gates[:, :count] + eps, gates[:, count:] * 2, comb)


@compiled_on_gpu
def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """y [rows, D] a sublayer's output -> the streams after it: comb[:, i, k] carries stream i into stream k."""
    wide = widen(streams)
    carried = [
        sum(
            (comb[:, i, k, None] * wide[:, i] for i in range(1, streams.shape[1])),
            comb[:, 0, k, None] * wide[:, 0] + post[:, k, None] * y,
        )
        for k in range(streams.shape[1])
    ]
    return torch.stack(carried, dim=1).to(streams.dtype)


@compiled_on_gpu
def queries(
    x: Tensor, down: Tensor, norm: Tensor, up: Tensor, cos: Tensor, sin: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """x [B, T, D], cos and sin [B, T, pairs] -> rotated queries [B, T, heads, head_dim], latent [B, T, q_lora_rank]."""
    latent = rms_norm(linear(x, down), norm, eps)
    return rotate(linear(latent, up).unflatten(-1, (heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2)), latent


@compiled_on_gpu
def window_keys(x: Tensor, weight: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x [..., T, D] -> what the window cache gives back of its rows [..., T, head_dim]."""
    return window_rows(rotate(rms_norm(linear(x, weight), norm, eps), cos, sin))


@compiled_on_gpu
def project(looked: Tensor, down: Tensor, up: Tensor, cos: Tensor, sin: Tensor, groups: int) -> Tensor:
    """looked [..., T, heads, head_dim] -> [..., T, D]: turned back, then through one low-rank matrix a group."""
    back = rotate(looked, cos.unsqueeze(-2), -sin.unsqueeze(-2))
    grouped = back.flatten(-2).unflatten(-1, (groups, -1))
    matrices = down.unflatten(0, (groups, -1)).to(looked.dtype)
    latent = torch.cat([functional.linear(grouped[..., g, :], matrices[g]) for g in range(groups)], dim=-1)
    return linear(latent, up)


@compiled_on_gpu
def experts(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    chosen: int,
    factor: float,
    limit: float,
) -> Routed:
    """x [rows, D]; gate and up [experts + 1, M, D], down [experts + 1, D, M], the shared expert last. All experts are
    computed, and those that a row did not choose count nothing."""
    scores = torch.sqrt(functional.softplus(functional.linear(widen(x), router)))
    ids = (scores + bias).topk(chosen, dim=-1).indices
    picked = functional.one_hot(ids, scores.shape[1]).sum(dim=1).to(scores.dtype)
    weights = scores * picked
    if chosen > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SUM_MIN)
    weights = torch.cat((weights * factor, torch.ones_like(weights[:, :1])), dim=1)
    hidden = functional.silu(linear(x, gate.flatten(0, 1)).clamp(max=limit))
    hidden = hidden * linear(x, up.flatten(0, 1)).clamp(-limit, limit)
    weighted = hidden.unflatten(1, (weights.shape[1], -1)) * weights.unsqueeze(2)
    output = linear(weighted.flatten(1).to(x.dtype), down.transpose(0, 1).flatten(1))
    load = picked.mean(dim=0)
    likely = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
    return Routed(output, load, (likely * load).sum() * (scores.shape[1] / chosen))


@compiled_on_gpu
def remember(streams: Tensor, memory: Tensor, projection: Tensor, query: Tensor, key: Tensor, eps: float) -> Tensor:
    """streams [rows, S, D], memory [rows, columns · width] -> the streams with what their gates let in."""
    count, width = streams.shape[1:]
    projected = linear(memory, projection)
    keys, value = projected[:, : count * width].unflatten(1, (count, width)), projected[:, count * width :]
    wide, wide_keys = widen(streams), widen(keys)
    norms = torch.rsqrt((wide * wide).mean(dim=2) + eps) * torch.rsqrt((wide_keys * wide_keys).mean(dim=2) + eps)
    dots = (wide * (query * key) * wide_keys).sum(dim=2) * norms * width**-0.5
    roots = torch.sqrt(dots.abs().clamp(min=MAGNITUDE_MIN))
    gates = torch.sigmoid(torch.where(dots < 0, -roots, roots))
    return (wide + gates.unsqueeze(2) * value.unsqueeze(1)).to(streams.dtype)
