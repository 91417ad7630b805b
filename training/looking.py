"""Attention of whole sequences: the window in chunks, global entries densely under a mask, one softmax over both.

Sequences are rows of a batch that may hold several documents, one after the other. `documents` [B, T] numbers them; a
token sees its own document only. Documents start at even places, so that no pair of tokens straddles two of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.kernels.numerics import widen

from .compiling import compiled_on_gpu
from .layers import linear, rms_norm, rotate
from .rounding import global_entries, index_keys

MASKED = -1e30
"""The score of what a row does not see: finite, so that a row that sees nothing has a gradient of 0."""


@compiled_on_gpu
def look_at_window(
    queries: Tensor, window: Tensor, documents: Tensor, sink: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """queries [B, T, H, d], window [B, T, d]: each row sees its own and the `reach` - 1 rows before.

    -> output [B, T, H, d], log of the denominators [B, T, H]."""
    scores = _window_scores(queries, window, documents, reach)
    total = torch.logaddexp(torch.logsumexp(scores, dim=-1), sink)
    weights = torch.exp(scores - total.unsqueeze(-1))
    return _window_sum(weights.to(queries.dtype), window, reach), total


@compiled_on_gpu
def look_at_both(
    queries: Tensor, window: Tensor, documents: Tensor, sink: Tensor, entries: Tensor, chosen: Tensor, reach: int
) -> tuple[Tensor, Tensor]:
    """As `look_at_window`, and at `entries` [B, E, d] where `chosen` [B, T, E]."""
    near = _window_scores(queries, window, documents, reach)
    far = widen(_products(queries, entries)) * queries.shape[-1] ** -0.5
    far = torch.where(chosen.unsqueeze(2), far, MASKED)
    total = torch.logaddexp(torch.logsumexp(near, dim=-1), torch.logsumexp(far, dim=-1))
    total = torch.logaddexp(total, sink)
    weights = torch.exp(far - total.unsqueeze(-1)).to(queries.dtype)
    seen = torch.bmm(weights.flatten(1, 2), entries).unflatten(1, weights.shape[1:3])
    weights = torch.exp(near - total.unsqueeze(-1)).to(queries.dtype)
    return _window_sum(weights, window, reach) + seen, total


@compiled_on_gpu
def look_at_rows(queries: Tensor, context: Tensor, own: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
    """queries [G, block, H, d]; context [G, W, d] where `seen` [G, W]; own [G, block, d], which all see
    -> [G, block, H, d]."""
    keys = torch.cat((context, own), dim=1)
    scores = widen(torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2))) * queries.shape[-1] ** -0.5
    scores = scores.unflatten(1, queries.shape[1:3])
    valid = torch.cat((seen, seen.new_ones(len(own), own.shape[1])), dim=1)
    scores = torch.where(valid[:, None, None], scores, MASKED)
    total = torch.logaddexp(torch.logsumexp(scores, dim=-1), sink)
    weights = torch.exp(scores - total.unsqueeze(-1)).to(queries.dtype)
    return torch.bmm(weights.flatten(1, 2), keys).view(queries.shape)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [B, T, H, d], keys [B, E, d] -> [B, T, H, E]."""
    return torch.bmm(queries.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, queries.shape[1:3])


def _in_chunks(rows: Tensor, reach: int) -> Tensor:
    """rows [B, T, ...] -> [B, T / reach, 2 · reach, ...]: each chunk and the one before; zeros before the first."""
    chunks = rows.unflatten(1, (-1, reach))
    return torch.cat((torch.cat((torch.zeros_like(chunks[:, :1]), chunks[:, :-1]), dim=1), chunks), dim=2)


def _window_scores(queries: Tensor, window: Tensor, documents: Tensor, reach: int) -> Tensor:
    """[B, T, H, 2 · reach] at least float32."""
    batch, tokens, heads, width = queries.shape
    chunks = tokens // reach
    keys = _in_chunks(window, reach).flatten(0, 1)
    products = torch.bmm(queries.reshape(batch * chunks, reach * heads, width), keys.transpose(1, 2))
    scores = widen(products).view(batch, chunks, reach, heads, 2 * reach) * width**-0.5
    row = torch.arange(reach, device=queries.device)[:, None]
    key = torch.arange(2 * reach, device=queries.device)
    near = (key > row) & (key <= row + reach)
    same = documents.unflatten(1, (-1, reach)).unsqueeze(3) == _in_chunks(documents + 1, reach).unsqueeze(2) - 1
    scores = torch.where((near & same).unsqueeze(3), scores, MASKED)
    return scores.view(batch, tokens, heads, 2 * reach)


def _window_sum(weights: Tensor, window: Tensor, reach: int) -> Tensor:
    batch, tokens, heads, _ = weights.shape
    keys = _in_chunks(window, reach).flatten(0, 1)
    summed = torch.bmm(weights.reshape(batch * tokens // reach, reach * heads, 2 * reach), keys)
    return summed.view(batch, tokens, heads, -1)


@compiled_on_gpu
def latents(x: Tensor, value: Tensor, gate: Tensor | None, norm: Tensor, ratio: int, eps: float) -> Tensor:
    """x [B, T, D] -> one latent for each group of `ratio` tokens [B, T / ratio, head_dim]."""
    pooled = linear(x, value)
    if gate is not None:
        groups = widen(pooled).unflatten(1, (-1, ratio))
        shares = torch.softmax(widen(linear(x, gate)).unflatten(1, (-1, ratio)), dim=2)
        pooled = (shares * groups).sum(dim=2).to(x.dtype)
    return rms_norm(pooled, norm, eps)


@compiled_on_gpu
def entries_of(latent: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the global cache gives back of latents [B, E, head_dim]; cos and sin [B, E, pairs] of the groups' starts."""
    return global_entries(rotate(latent, cos, sin))


@compiled_on_gpu
def index_keys_of(latent: Tensor, weight: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Index keys [B, E, index_head_dim] of latents."""
    return index_keys(rotate(rms_norm(linear(latent, weight), norm, eps), cos, sin))


@compiled_on_gpu
def index_queries_of(
    latent: Tensor, x: Tensor, up: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """latent [B, T, q_lora_rank], x [B, T, D] -> index queries [B, T, heads, width], their weights [B, T, heads]."""
    turned = rotate(linear(latent, up).unflatten(-1, (heads, -1)), cos.unsqueeze(-2), sin.unsqueeze(-2))
    weights = widen(linear(x, weight)) * (turned.shape[-1] ** -0.5 * heads**-0.5)
    return index_keys(turned), weights


@compiled_on_gpu
def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[B, T, E], at least float32."""
    return (functional.relu(widen(_products(queries, keys))) * weights.unsqueeze(3)).sum(dim=2)


@compiled_on_gpu
def visible_entries(documents: Tensor, ratio: int) -> Tensor:
    """documents [B, T] -> which entries each row sees [B, T, T / ratio] bool."""
    places = torch.arange(documents.shape[1], device=documents.device)
    entry = torch.arange(documents.shape[1] // ratio, device=documents.device)
    closed = entry < ((places + 1) // ratio).unsqueeze(1)
    return closed & (documents.unsqueeze(2) == documents[:, ::ratio].unsqueeze(1))


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """Marks the `count` best allowed scores of each row [..., E], all of them if there are fewer; of equal ones those
    with the lowest index."""
    if scores.shape[-1] <= count:
        return allowed
    values = torch.where(allowed, scores, -torch.inf)
    last = values.topk(count, dim=-1).values[..., -1:]
    return _at_least(values, last, allowed, count)


@compiled_on_gpu
def _at_least(values: Tensor, last: Tensor, allowed: Tensor, count: int) -> Tensor:
    above = values > last
    equal = (values == last) & allowed
    room = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))


def candidates(scores: Tensor, visible: Tensor, *, block: int, blocks: int, first: int = 0) -> Tensor:
    """scores and visible [B, T, E] of an index source with ratio 1 -> the entries of the best blocks [B, T, E]: by
    their best visible entry, the block of the newest entry first. `first` is the place of the first of the T rows."""
    maxima = _block_maxima(scores, visible, block, first)
    kept = best(maxima, maxima > -torch.inf, blocks)
    return kept.repeat_interleave(block, dim=-1)[..., : scores.shape[-1]]


@compiled_on_gpu
def _block_maxima(scores: Tensor, visible: Tensor, block: int, first: int) -> Tensor:
    seen = functional.pad(torch.where(visible, scores, -torch.inf), (0, -scores.shape[-1] % block), value=-torch.inf)
    maxima = seen.unflatten(-1, (-1, block)).amax(dim=-1)
    newest = (first + torch.arange(scores.shape[1], device=scores.device)).unsqueeze(1) // block
    return torch.where(torch.arange(maxima.shape[-1], device=scores.device) == newest, torch.inf, maxima)


@compiled_on_gpu
def index_loss(scores: Tensor, queries: Tensor, entries: Tensor, totals: Tensor, visible: Tensor) -> Tensor:
    """Divergence of what index scores make of the visible entries from what attention makes of them.

    scores [B, rows, E]; queries [B, rows, H, d] and entries [B, E, d] of attention, `totals` [B, rows, H] the log of
    its denominators; `visible` [B, rows, E]. -> scalar, the mean over rows that see any."""
    masses = torch.exp(widen(_products(queries, entries)) * queries.shape[-1] ** -0.5 - totals.unsqueeze(3)).sum(dim=2)
    masses = torch.where(visible, masses, 0.0)
    target = masses / (masses.sum(dim=2, keepdim=True) + 1e-9)
    guess = torch.log_softmax(torch.where(visible, scores, MASKED), dim=2)
    terms = torch.where(visible, target * (torch.log(target + 1e-9) - guess), 0.0).sum(dim=2)
    counted = visible.any(dim=2).to(terms.dtype)
    return (terms * counted).sum() / (counted.sum() + 1e-6)
