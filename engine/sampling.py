"""Draws tokens from logits, many rows at once; what a row gives never depends on its neighbours.

    raw logits ──process_rows──▶ log-weights ──draw_ids──▶ ids ──report_tokens──▶ tokens with log-probabilities

Order of the steps (`runtime.md` §7.1): logit bias → allowed tokens, mask of `min_tokens` → penalties → bad
words → grammar mask → greedy, or temperature → top-k → top-p → min-p → draw. Ties go to the lowest id everywhere.
Log-probabilities are of raw logits. What is masked stays so whatever comes after: the masks may be put on in any order.

A row is one token to be drawn, not one request: where drafts are verified, a request has a row after each of them.
Rules that touch few tokens are applied row by row, all that runs over the vocabulary for all rows together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import InternalError, InvalidFieldError
from whalepod.core.ids import RequestId

from .bad_words import BadWords
from .grammar.masks import Flags
from .interface import EngineRequest, SampledToken
from .noise import DRAFT_DRAW, ROUGH_ERROR, TARGET_DRAW, Words, branch_key, gumbel_of, noise_words, rough_gumbel_of
from .sampling_params import SamplingParams
from .token_counts import TokenCounts
from .truncation import best_ranks, ids_of, ranks_of, truncate

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

VALUES_AT_ONCE = 1 << 17
"""Logits that are worked on together: what they need beside them stays in the processor's cache."""


def noise_key(request: EngineRequest) -> int:
    """64-bit key of a request's noise: of its seed, else the key it came with, else one derived from its id; and of
    which choice it is.

    Every rank that meets the request derives the same one.
    """
    if request.sampling.seed is not None:
        return branch_key(request.sampling.seed % 2**64, request.branch)
    key = request.noise_key if request.noise_key is not None else key_of_request(request.request_id)
    return branch_key(key, request.branch)


def key_of_request(request_id: RequestId) -> int:
    return int.from_bytes(hashlib.sha256(b"whalepod noise" + request_id).digest()[:8], "little")


class RowEdits(NamedTuple):
    """Changes of single weights of a row."""

    ids: Ids
    """[edits], each once."""
    factors: NDArray[np.float32]
    """[3, edits]: bias; repetition penalty; what is subtracted."""


class Sampler:
    """What the tokens of one request are drawn by. Every token id in `params` is below the vocabulary's size.

    Its only state is a function of the tokens so far, so it can be built anew at any point of the request.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        key: int,
        eos_id: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.key = key
        self._outputs = TokenCounts(output_ids)
        self._output_count = len(output_ids)
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._bias = np.array([params.logit_bias[token] for token in sorted(params.logit_bias)], np.float32)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos_id})
        self._end_ids = np.array(sorted(ends), np.int64)
        self._allowed: Flags | None = None
        """[vocab] of `allowed_token_ids`; made when it is first asked for."""
        self._bad_words = BadWords(params.bad_word_ids, output_ids) if params.bad_word_ids else None
        self._prompt_ids = prompt_ids
        self._seen: TokenCounts | None = None
        """Of prompt and output; made when a penalty first asks for it."""

    def observe(self, token_id: int) -> None:
        """A token was drawn here or elsewhere: it now counts as output."""
        self._outputs.add(token_id)
        self._output_count += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self._bad_words is not None:
            self._bad_words.observe(token_id)

    def apply_rules(self, weights: Logits, *, drafts: Sequence[int], allowed: Flags | None) -> None:
        """Steps up to the grammar's mask, on one row [vocab] in place. `drafts` count as output after what was
        observed."""
        params = self.params
        if len(self._bias_ids):
            weights[self._bias_ids] += self._bias
        mask = self.mask(allowed, vocab_size=len(weights))
        barred = self._barred(drafts, mask, vocab_size=len(weights))
        if len(barred):
            weights[barred] = -np.inf
        if params.repetition_penalty != 1:
            ids = self._seen_with(drafts).ids
            penalty, values = np.float32(params.repetition_penalty), weights[ids]
            weights[ids] = np.where(values > 0, values / penalty, values * penalty)
        if params.frequency_penalty or params.presence_penalty:
            drawn = self._drawn_with(drafts)
            weights[drawn.ids] -= np.float32(params.frequency_penalty) * drawn.counts + np.float32(
                params.presence_penalty
            )
        if mask is not None:
            np.copyto(weights, -np.inf, where=~mask)

    def edits(self, *, drafts: Sequence[int], allowed: Flags | None, vocab_size: int) -> RowEdits | None:
        """What `apply_rules` does beside `mask`, as numbers; None: nothing."""
        params = self.params
        barred = self._barred(drafts, self.mask(allowed, vocab_size=vocab_size), vocab_size=vocab_size)
        seen = self._seen_with(drafts) if params.repetition_penalty != 1 else None
        drawn = self._drawn_with(drafts) if params.frequency_penalty or params.presence_penalty else None
        every = [self._bias_ids, barred, *(counts.ids for counts in (seen, drawn) if counts is not None)]
        if not any(map(len, every)):
            return None
        ids = np.unique(np.concatenate(every))
        factors = np.zeros((3, len(ids)), np.float32)
        factors[1] = 1
        factors[0, np.searchsorted(ids, self._bias_ids)] = self._bias
        factors[0, np.searchsorted(ids, barred)] = -np.inf
        if seen is not None:
            factors[1, np.searchsorted(ids, seen.ids)] = params.repetition_penalty
        if drawn is not None:
            less = np.float32(params.frequency_penalty) * drawn.counts + np.float32(params.presence_penalty)
            factors[2, np.searchsorted(ids, drawn.ids)] = less
        return RowEdits(ids, factors)

    def mask(self, allowed: Flags | None, *, vocab_size: int) -> Flags | None:
        """[vocab] bool: those of `allowed` (None: all) that `allowed_token_ids` names. None: every token."""
        ids = self.params.allowed_token_ids
        if ids is None:
            return allowed
        if self._allowed is None:
            self._allowed = np.zeros(vocab_size, np.bool_)
            self._allowed[list(ids)] = True
        return self._allowed if allowed is None else self._allowed & allowed

    def dead_end(self, drafts: Sequence[int], allowed: Flags | None, *, vocab_size: int) -> InvalidFieldError | None:
        """Why no token may follow `drafts`: the request contradicts itself here. None: one may."""
        params = self.params
        mask = self.mask(allowed, vocab_size=vocab_size)
        if params.allowed_token_ids is not None and mask is not None and not mask.any():
            return InvalidFieldError(
                "allowed_token_ids", "allowed_token_ids: none of them may follow in the form that was asked for"
            )
        if self._bad_words is None or _leaves_others(self._bad_words.next_ids(drafts), mask, vocab_size=vocab_size):
            return None
        return InvalidFieldError("bad_words", "bad_words: every token that may follow would complete one of them")

    def _seen_with(self, drafts: Sequence[int]) -> TokenCounts:
        if self._seen is None:
            self._seen = TokenCounts([*self._prompt_ids, *self._outputs.ids])
        return self._seen.plus(drafts) if drafts else self._seen

    def _drawn_with(self, drafts: Sequence[int]) -> TokenCounts:
        return self._outputs.plus(drafts) if drafts else self._outputs

    def _barred(self, drafts: Sequence[int], mask: Flags | None, *, vocab_size: int) -> Ids:
        """[ids] each once: what may not follow though `mask` allows it. What would leave nothing of the mask yields:
        the ends that `min_tokens` bars, and bad words, where a draft is in a dead end."""
        barred = self._end_ids[:0]
        if self._bad_words is not None:
            bad = self._bad_words.next_ids(drafts)
            barred = bad if _leaves_others(bad, mask, vocab_size=vocab_size) else barred
        if self._output_count + len(drafts) < self.params.min_tokens:
            more = self._end_ids if not len(barred) else np.union1d(barred, self._end_ids)
            barred = more if _leaves_others(more, mask, vocab_size=vocab_size) else barred
        return barred


def _leaves_others(ids: Ids, mask: Flags | None, *, vocab_size: int) -> bool:
    """Without `ids`, each once, something of the mask is left."""
    if mask is None:
        return len(ids) < vocab_size
    return bool(np.count_nonzero(mask) > np.count_nonzero(mask[ids]))


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A row of logits, and what its token is drawn by."""

    sampler: Sampler
    position: int
    """Of the token that is drawn: its absolute index in prompt + output."""
    drafts: Sequence[int] = ()
    """Tokens between what the sampler has observed and `position`: they count as output here."""
    allowed: Flags | None = None
    """[vocab] bool: what a grammar lets follow, at least one token. It has the last word: where `min_tokens` would
    leave nothing of it, `min_tokens` yields."""


def draw_rows(logits: Logits, rows: Sequence[DrawRow]) -> list[SampledToken | InternalError]:
    """A token for each row, from raw logits [rows, vocab] float32; an error for rows whose logits are no numbers.

    Does not count the tokens: call `observe`.
    """
    drawn: list[SampledToken | InternalError] = []
    at_once = max(1, VALUES_AT_ONCE // logits.shape[1])
    for start in range(0, len(rows), at_once):
        drawn += _draw_chunk(logits[start : start + at_once], rows[start : start + at_once])
    return drawn


def _draw_chunk(logits: Logits, rows: Sequence[DrawRow]) -> list[SampledToken | InternalError]:
    good = [index for index, is_good in enumerate(are_numbers(logits)) if is_good]
    drawn: list[SampledToken | InternalError] = [InternalError("the model produced logits that are no numbers")] * len(
        rows
    )
    if len(good) < len(rows):
        logits, rows = logits[good], [rows[index] for index in good]
    if rows:
        ids = draw_ids(process_rows(logits, rows), rows)
        for index, token in zip(good, report_tokens(logits, rows, ids), strict=True):
            drawn[index] = token
    return drawn


def are_numbers(logits: Logits) -> NDArray[np.bool_]:
    """[rows] bool: no NaN, no +∞, and not only −∞."""
    return np.isfinite(logits.max(axis=1))


def process_rows(logits: Logits, rows: Sequence[DrawRow]) -> Logits:
    """Log-weights [rows, vocab] float32: the law of a row's token is their softmax.
    Of a greedy row, 0 for its token and −∞ for all others. `logits` are numbers, and stay as they are."""
    weights = logits.copy()
    for index, row in enumerate(rows):
        row.sampler.apply_rules(weights[index], drafts=row.drafts, allowed=row.allowed)
    params = [row.sampler.params for row in rows]
    greedy = np.array([each.greedy for each in params], np.bool_)
    if greedy.any():
        best = weights[greedy].argmax(axis=1)
        weights[greedy] = -np.inf
        weights[np.flatnonzero(greedy), best] = 0
    if not greedy.all():
        weights /= np.array([1 if each.greedy else each.temperature for each in params], np.float32)[:, None]
        truncate(
            weights,
            top_k=np.array([0 if each.greedy else each.top_k for each in params], np.int64),
            top_p=np.array([1 if each.greedy else each.top_p for each in params], np.float64),
            min_p=np.array([0 if each.greedy else each.min_p for each in params], np.float64),
        )
    return weights


def probabilities(weights: Logits) -> NDArray[np.float64]:
    """Softmax of log-weights [rows, vocab]: float64, each row sums to 1. 0 where nothing is kept."""
    shares = np.exp(weights.astype(np.float64) - weights.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


def draw_ids(weights: Logits, rows: Sequence[DrawRow], *, columns: Sequence[int | None] | None = None) -> Ids:
    """[rows] the token with the largest sum of log-weight and Gumbel noise, the latter keyed by request and position.
    `columns`: for rows with a number, the noise is not the target's but that of drafts in this column.

    Where it cannot be seen in float32 which one that is, it is computed in float64.
    """
    ids = weights.argmax(axis=1)
    drawn = [index for index, row in enumerate(rows) if not row.sampler.params.greedy]
    if not drawn:
        return ids
    words = noise_words(
        np.array([rows[index].sampler.key for index in drawn], np.uint64),
        positions=np.array([rows[index].position for index in drawn], np.uint64),
        lanes=weights.shape[1],
        **_noise_of(drawn, columns),
    )
    if len(drawn) < len(rows):
        weights = weights[drawn]
    rough = weights - weights.max(axis=1, keepdims=True)
    rough += rough_gumbel_of(words)
    near, tokens = np.nonzero(rough >= rough.max(axis=1, keepdims=True) - np.float32(_UNSURE))
    sums = weights[near, tokens] + gumbel_of(words[near, tokens])
    order = np.lexsort((tokens, -sums, near))
    firsts = np.searchsorted(near, np.arange(len(drawn)))  # `near` ascends, before the sort and after it
    ids[drawn] = tokens[order[firsts]]
    return ids


def _noise_of(drawn: Sequence[int], columns: Sequence[int | None] | None) -> dict[str, Words]:
    if columns is None:
        return {}
    own = [columns[index] for index in drawn]
    return {
        "purpose": np.array([TARGET_DRAW if column is None else DRAFT_DRAW for column in own], np.uint64),
        "sub": np.array([column or 0 for column in own], np.uint64),
    }


_UNSURE = 2 * ROUGH_ERROR + 0.1
"""Two sums that differ by more in float32 do not change places in float64. The last tenth is for rounding them."""


def report_tokens(logits: Logits, rows: Sequence[DrawRow], ids: Ids) -> list[SampledToken]:
    """Tokens `ids` of the rows with what was asked for about them, from the raw logits [rows, vocab]."""
    tokens = [SampledToken(int(token_id)) for token_id in ids]
    asked = [(index, k) for index, row in enumerate(rows) if (k := row.sampler.params.logprobs) is not None]
    if not asked:
        return tokens
    chosen = [index for index, _ in asked]
    raw = logits if len(chosen) == len(rows) else logits[chosen]
    best = ids_of(best_ranks(ranks_of(raw), max(1, *(k for _, k in asked))))
    of_interest = np.concatenate([ids[chosen, None], best], axis=1)
    told = logprobs_at(raw, of_interest)
    for (index, k), top_ids, values in zip(asked, best.tolist(), told.tolist(), strict=True):
        tokens[index] = SampledToken(
            tokens[index].id, logprob=values[0], top_ids=tuple(top_ids[:k]), top_logprobs=tuple(values[1 : k + 1])
        )
    return tokens


def logprobs_at(logits: Logits, ids: Ids) -> Logits:
    """[rows, n] float32: log-softmax of logits [rows, vocab] at ids [rows, n], normalised with a float64 sum."""
    peaks = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits.astype(np.float64) - peaks).sum(axis=1, keepdims=True)
    shifted = np.take_along_axis(logits, ids, axis=1).astype(np.float64) - peaks
    return (shifted - np.log(sums)).astype(np.float32)
