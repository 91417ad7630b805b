"""Draws tokens where their logits are, on a GPU: the same tokens as `sampling.draw_rows`, whose rules these are.

    groups ──one copy──▶ weights ─ edits, masks ─▶ plain rows: draw ─────┐
                                                   truncated: draw_kept ─┴▶ ids ─▶ host; unsure rows: drawn there

Log-probabilities differ from the host's by the last bit of a float32 at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from whalepod.core.errors import InternalError
from whalepod.kernels.sampling import Edits, Limits, Noise, apply_edits, apply_masks, draw, draw_kept, log_sums
from whalepod.kernels.top_entries import top_entries

from .grammar.masks import pack
from .interface import SampledToken
from .sampling import DrawRow, draw_rows
from .sampling_params import SamplingParams

ROWS_AT_ONCE = 256
"""Of the released vocabulary, 132 MB of weights beside the logits."""

Drawn = SampledToken | InternalError


class Group(NamedTuple):
    """Rows of one request."""

    logits: Tensor
    """[rows, vocab] float32; stays as it is."""
    rows: Sequence[DrawRow]


class _Report(NamedTuple):
    """What is told about some of the rows."""

    rows: Sequence[int]
    raw: Tensor
    """[asked, vocab]"""
    best: Tensor
    """[asked, n] int64 ids of the n ≥ k best in no order, then −1."""


def draw_groups(groups: Sequence[Group]) -> list[list[Drawn]]:
    """A token for each row of each group. Does not count the tokens: call `observe`."""
    drawn: list[list[Drawn]] = [[] for _ in groups]
    order = sorted(range(len(groups)), key=lambda index: _truncates(groups[index]))
    while order:
        count, rows = 0, 0
        while count < len(order) and (count == 0 or rows + len(groups[order[count]].rows) <= ROWS_AT_ONCE):
            rows += len(groups[order[count]].rows)
            count += 1
        batch, order = order[:count], order[count:]
        tokens = iter(_draw_batch([groups[index] for index in batch]))
        for index in batch:
            drawn[index] = [next(tokens) for _ in groups[index].rows]
    return drawn


def _truncates(group: Group) -> bool:
    if not group.rows:
        return False
    params, vocab = group.rows[0].sampler.params, group.logits.shape[1]
    return not params.greedy and (_top_k(params, vocab) < vocab or params.top_p < 1 or params.min_p > 0)


def _top_k(params: SamplingParams, vocab: int) -> int:
    return params.top_k if 0 < params.top_k < vocab else vocab


@torch.inference_mode()
def _draw_batch(groups: Sequence[Group]) -> list[Drawn]:
    """Groups that truncate come last."""
    rows = [row for group in groups for row in group.rows]
    if not rows:
        return []
    plain = sum(len(group.rows) for group in groups if not _truncates(group))
    weights = torch.cat([group.logits[: len(group.rows)] for group in groups])
    report = _report(weights, rows)
    broken = _edit(weights, rows)
    ids, unsure = _draw(weights, rows, plain)
    ids_list = ids.tolist()
    tokens: list[Drawn] = [SampledToken(token_id) for token_id in ids_list]
    if report is not None:
        _tell(report, rows, ids, tokens)
    raw = [(group, place) for group in groups for place in range(len(group.rows))]
    for index in (unsure | broken).nonzero()[:, 0].tolist():
        group, place = raw[index]
        tokens[index] = draw_rows(group.logits[place : place + 1].cpu().numpy(), [rows[index]])[0]
    return tokens


def _draw(weights: Tensor, rows: Sequence[DrawRow], plain: int) -> tuple[Tensor, Tensor]:
    params = [row.sampler.params for row in rows]
    vocab = weights.shape[1]
    noise = Noise(
        _put(np.array([row.sampler.key for row in rows], np.uint64).view(np.int64), weights),
        _put(np.array([row.position for row in rows], np.int64), weights),
    )
    temperatures = _put(np.array([0 if each.greedy else each.temperature for each in params], np.float32), weights)
    parts = [draw(weights[:plain], temperatures[:plain], Noise(*(each[:plain] for each in noise)))]
    if plain < len(rows):
        kept = params[plain:]
        with np.errstate(divide="ignore"):  # log 0, where it is off
            floors = np.log(np.array([each.min_p for each in kept], np.float64)).astype(np.float32)
        limits = Limits(
            _put(np.array([_top_k(each, vocab) for each in kept], np.int64), weights),
            _put(np.array([each.top_p for each in kept], np.float64), weights),
            _put(floors, weights),
        )
        behind = Noise(*(each[plain:] for each in noise))
        parts.append(draw_kept(weights[plain:], temperatures[plain:], behind, limits))
    return torch.cat([ids for ids, _ in parts]), torch.cat([unsure for _, unsure in parts])


def _edit(weights: Tensor, rows: Sequence[DrawRow]) -> Tensor:
    """Rules and masks, in place. [rows] bool: where the raw logits of a row that is edited are no numbers."""
    edits = [
        (index, each)
        for index, row in enumerate(rows)
        if (each := row.sampler.edits(drafts=row.drafts, allowed=row.allowed, vocab_size=weights.shape[1])) is not None
    ]
    vocab = weights.shape[1]
    masks = [(index, row.sampler.mask(row.allowed, vocab_size=vocab)) for index, row in enumerate(rows)]
    masked = {index: mask for index, mask in masks if mask is not None}
    broken = torch.zeros(len(rows), dtype=torch.bool, device=weights.device)
    touched = sorted({*masked, *(index for index, _ in edits)})
    if touched:
        at = _put(np.array(touched, np.int64), weights)
        broken[at] = ~weights[at].amax(1).isfinite()
    if edits:
        places = [np.stack((np.full(len(each.ids), index, np.int64), each.ids)) for index, each in edits]
        factors = np.concatenate([each.factors for _, each in edits], axis=1)
        apply_edits(weights, Edits(_put(np.concatenate(places, axis=1), weights), _put(factors, weights)))
    if masked:
        words = pack(np.stack([*masked.values()]))
        apply_masks(weights, _put(np.array([*masked], np.int64), weights), _put(words.view(np.int32), weights))
    return broken


def _report(weights: Tensor, rows: Sequence[DrawRow]) -> _Report | None:
    asked = [(index, k) for index, row in enumerate(rows) if (k := row.sampler.params.logprobs) is not None]
    if not asked:
        return None
    at = [index for index, _ in asked]
    raw = weights[_put(np.array(at, np.int64), weights)]
    most = max(1, *(k for _, k in asked))
    visible = torch.full((len(at),), weights.shape[1], dtype=torch.int32, device=weights.device)
    return _Report(at, raw, top_entries(raw, visible, count=1 << (most - 1).bit_length()).long())


def _tell(report: _Report, rows: Sequence[DrawRow], ids: Tensor, tokens: list[Drawn]) -> None:
    """Put log-probabilities into the tokens of the rows that ask for them."""
    chosen = ids[_put(np.array(report.rows, np.int64), ids)][:, None]
    of_interest = torch.cat((chosen, report.best), dim=1)
    values = report.raw.gather(1, of_interest.clamp(min=0))
    told = (values.double() - log_sums(report.raw)[:, None]).float().cpu().numpy()
    best, weights = report.best.cpu().numpy(), values[:, 1:].cpu().numpy()
    order = np.lexsort((best, -weights, best < 0))
    for place, index in enumerate(report.rows):
        k = rows[index].sampler.params.logprobs or 0
        first = order[place][: min(k, int((best[place] >= 0).sum()))]
        tokens[index] = SampledToken(
            _id_of(tokens[index]),
            logprob=float(told[place, 0]),
            top_ids=tuple(best[place][first].tolist()),
            top_logprobs=tuple(told[place, 1:][first].tolist()),
        )


def _id_of(token: Drawn) -> int:
    assert isinstance(token, SampledToken)
    return token.id


def _put(values: np.ndarray, beside: Tensor) -> Tensor:
    return torch.from_numpy(values).to(beside.device)
