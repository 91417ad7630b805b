"""Draws a request's tokens from its logits. One row at a time: what a row gives never depends on its neighbours.

Order of the steps (`runtime.md` §7.1): logit bias → masks of `min_tokens` → penalties → grammar mask → greedy, or
temperature → top-k → top-p → min-p → draw. Ties go to the lowest id everywhere. Log-probabilities are of raw logits.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import InternalError
from whalepod.core.ids import RequestId

from .grammar.masks import Flags
from .interface import EngineRequest, SampledToken
from .noise import gumbels
from .sampling_params import SamplingParams

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


def noise_key(request: EngineRequest) -> int:
    """64-bit key of a request's noise: its seed, else the key it came with, else one derived from its id.

    Every rank that meets the request derives the same one.
    """
    if request.sampling.seed is not None:
        return request.sampling.seed % 2**64
    return request.noise_key if request.noise_key is not None else key_of_request(request.request_id)


def key_of_request(request_id: RequestId) -> int:
    return int.from_bytes(hashlib.sha256(b"whalepod noise" + request_id).digest()[:8], "little")


class Sampler:
    """Draws the tokens of one request. Every token id in `params` is below the vocabulary's size.

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
        self._params = params
        self._key = key
        self._outputs = Counter(output_ids)
        self._output_count = len(output_ids)
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        self._bias = np.array([params.logit_bias[token] for token in sorted(params.logit_bias)], np.float32)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {eos_id})
        self._end_ids = np.array(sorted(ends), np.int64)
        self._seen: NDArray[np.bool_] | None = None
        """[vocab] whether a token is in the prompt or the output; made when a penalty first asks for it."""
        self._prompt_ids = prompt_ids

    def observe(self, token_id: int) -> None:
        """A token was drawn here or elsewhere: it now counts as output."""
        self._outputs[token_id] += 1
        self._output_count += 1
        if self._seen is not None:
            self._seen[token_id] = True

    def draw(self, logits: Logits, *, position: int, allowed: Flags | None = None) -> SampledToken:
        """The token at `position` (absolute index in prompt + output), from the raw logits [vocab] float32 of the row
        before it. Does not count it: call `observe`. Raises InternalError on logits that are no numbers.

        `allowed` [vocab] bool: what a grammar lets follow, at least one token. It has the last word: where `min_tokens`
        would leave nothing of it, `min_tokens` yields."""
        if np.isnan(logits).any():
            raise InternalError("the model produced logits that are not numbers")
        weights = self._apply_rules(logits, allowed)
        if self._params.greedy:
            token_id = int(np.argmax(weights))
        else:
            token_id = self._draw_from(weights, position)
        return self._with_logprobs(logits, token_id)

    def _apply_rules(self, raw: Logits, allowed: Flags | None) -> Logits:
        """Steps up to the grammar's mask, on a copy."""
        params = self._params
        weights = raw.copy()
        weights[self._bias_ids] += self._bias
        if self._output_count < params.min_tokens and (allowed is None or self._more_than_ends(allowed)):
            weights[self._end_ids] = -np.inf
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            penalised = np.where(weights > 0, weights / penalty, weights * penalty)
            weights = np.where(self._seen_among(len(raw)), penalised, weights)
        if params.frequency_penalty or params.presence_penalty:
            drawn = np.array(list(self._outputs), np.int64)
            counts = np.array(list(self._outputs.values()), np.float32)
            weights[drawn] -= np.float32(params.frequency_penalty) * counts + np.float32(params.presence_penalty)
        if allowed is not None:
            np.copyto(weights, -np.inf, where=~allowed)
        return weights

    def _more_than_ends(self, allowed: Flags) -> bool:
        return bool(np.count_nonzero(allowed) > np.count_nonzero(allowed[self._end_ids]))

    def _seen_among(self, vocab_size: int) -> NDArray[np.bool_]:
        if self._seen is None:
            self._seen = np.zeros(vocab_size, np.bool_)
            self._seen[np.array([*self._prompt_ids, *self._outputs], np.int64)] = True
        return self._seen

    def _draw_from(self, weights: Logits, position: int) -> int:
        scaled = weights / np.float32(self._params.temperature)
        kept = kept_ids(scaled, self._params)
        noise = gumbels(self._key, position=position, lanes=len(weights))
        return int(kept[np.argmax(scaled[kept] + noise[kept])])

    def _with_logprobs(self, raw: Logits, token_id: int) -> SampledToken:
        wanted = self._params.logprobs
        if wanted is None:
            return SampledToken(token_id)
        logprobs = log_softmax(raw)
        top = best_ids(logprobs, wanted)
        return SampledToken(
            token_id,
            logprob=float(logprobs[token_id]),
            top_ids=tuple(int(token) for token in top),
            top_logprobs=tuple(float(logprobs[token]) for token in top),
        )


def kept_ids(scaled: Logits, params: SamplingParams) -> Ids:
    """Ids that top-k, top-p and min-p leave, ascending; at least one. `scaled` are the logits after temperature."""
    ids: Ids = np.arange(len(scaled), dtype=np.int64)
    if 0 < params.top_k < len(scaled):
        ids = best_ids(scaled, params.top_k)
    if params.top_p < 1:
        ids = ids[np.lexsort((ids, -scaled[ids]))]
        shares = np.cumsum(np.exp(scaled[ids].astype(np.float64) - scaled[ids[0]]))
        ids = ids[: int(np.searchsorted(shares, params.top_p * shares[-1])) + 1]
    if params.min_p > 0:
        ids = ids[scaled[ids] >= scaled[ids].max() + math.log(params.min_p)]
    return np.sort(ids)


def best_ids(values: Logits, count: int) -> Ids:
    """The `count` ids of the largest values, best first, ties to the lowest id."""
    if count >= len(values):
        chosen = np.arange(len(values), dtype=np.int64)
    elif count == 0:
        return np.zeros(0, np.int64)
    else:
        last = np.partition(values, len(values) - count)[len(values) - count]
        above = np.flatnonzero(values > last)
        chosen = np.concatenate([above, np.flatnonzero(values == last)[: count - len(above)]])
    return chosen[np.lexsort((chosen, -values[chosen]))]


def log_softmax(logits: Logits) -> Logits:
    """[vocab] float32, normalised with a float64 sum."""
    shifted = logits.astype(np.float64) - logits.max()
    return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
