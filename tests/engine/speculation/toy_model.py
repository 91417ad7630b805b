"""Very many tiny requests at once: 4 tokens, laws that can be written down, the product's noise and its scheduling.

What the network and the sampler do is replaced by tables, so that 2·10^5 answers take about a second.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whalepod.engine.noise import ACCEPT_COIN, DRAFT_DRAW, TARGET_DRAW, philox4x32
from whalepod.engine.speculation.acceptance import passes, residual
from whalepod.engine.speculation.cost_table import CostTable
from whalepod.engine.speculation.scheduling import allot, best_budget, survivals

VOCAB = 4
ANSWER = 3
DRAFTS = 3
RANK_REQUESTS = 4
"""A batch is so many requests."""

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Process = Callable[[Floats, Ints, Ints], Floats]
"""(raw logits [rows, vocab], output counts [rows, vocab], last tokens [rows]) -> probabilities [rows, vocab]"""

_RNG = np.random.default_rng(11)
TARGET = _RNG.normal(0, 1.2, (VOCAB, VOCAB))
DRAFT = TARGET + _RNG.normal(0, 1.0, (DRAFTS, VOCAB, VOCAB))
LOG_ODDS = _RNG.normal(0.3, 2.5, (DRAFTS, VOCAB))
"""[column, token before the draft]: says much about that token, so that trimming depends on the drafts."""


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def plain(raw: Floats, counts: Ints, last: Ints) -> Floats:
    return softmax(raw / 0.8)


def top_p(raw: Floats, counts: Ints, last: Ints) -> Floats:
    probabilities = softmax(raw)
    order = np.argsort(-probabilities, axis=-1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=-1)
    kept = np.cumsum(ranked, axis=-1) - ranked < 0.8
    np.put_along_axis(probabilities, order, np.where(kept, ranked, 0), axis=-1)
    return probabilities / probabilities.sum(axis=-1, keepdims=True)


def penalties(raw: Floats, counts: Ints, last: Ints) -> Floats:
    repeated = np.where(counts > 0, np.where(raw > 0, raw / 1.5, raw * 1.5), raw)
    return softmax(repeated - 0.6 * counts - 0.4 * (counts > 0))


def grammar(raw: Floats, counts: Ints, last: Ints) -> Floats:
    forbidden = np.arange(VOCAB) == ((last + 1) % VOCAB)[:, None]
    return softmax(np.where(forbidden, -np.inf, raw))


PROCESSES: dict[str, Process] = {"plain": plain, "top-p": top_p, "penalties": penalties, "grammar": grammar}


def law(process: Process) -> Floats:
    """[vocab^answer] probability of every answer after token 0."""
    found = np.zeros((VOCAB,) * ANSWER)
    for answer in itertools.product(range(VOCAB), repeat=ANSWER):
        probability, last, counts = 1.0, 0, np.zeros((1, VOCAB), np.int64)
        for token in answer:
            probability *= process(TARGET[[last]], counts, np.array([last]))[0, token]
            counts[0, token] += 1
            last = token
        found[answer] = probability
    return found.ravel()


def chi_square_p(observed: Ints, expected: Floats) -> float:
    """Chance of a deviation at least as large. Cells that expect less than 5 are one cell."""
    assert observed[expected == 0].sum() == 0, "what cannot be said was said"
    rare = expected < 5
    seen = np.append(observed[~rare], observed[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    half = torch.tensor([(len(seen) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def noise(keys: NDArray[np.uint64], positions: Ints, *, purpose: int, sub: int) -> Floats:
    """[requests, vocab] in (0, 1), as `engine/noise.py` has it for 4 lanes."""
    words = [np.full(keys.shape, word, np.uint64) for word in (0, sub, purpose)]
    drawn = philox4x32(keys, (words[0], positions.astype(np.uint64), words[1], words[2]))  # type: ignore[arg-type]
    return (np.stack(drawn, axis=-1).astype(np.float64) + 0.5) * 2.0**-32


def gumbel(u: Floats) -> Floats:
    return -np.log(-np.log1p(-u))


def log(values: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.log(values)


def count_leading(stands: NDArray[np.bool_], first: Ints) -> Ints:
    """[requests] drafts accepted. `stands` [rows]: whether the draft that a row judges stands; False in last rows.
    `first` [requests]: first rows."""
    row = np.arange(len(stands))
    return np.minimum.reduceat(np.where(stands, len(stands), row), first) - first


Schedule = Callable[[Floats], Ints]
"""Survivals [ranks, requests, columns] of this step to lengths [ranks, requests]."""


def fixed(length: int) -> Schedule:
    return lambda survival: np.full(survival.shape[:-1], length)


STAIRS = CostTable(
    bias=0.0,
    requests=[(1, 0.0)],
    rows=[(4, 1.0), (6, 1.5), (7, 1.9), (9, 1.95), (10, 2.4), (12, 2.45), (16, 3.4)],
    draft=[(1, 0.0)],
)


def scheduled(lag_steps: int) -> Schedule:
    """Top-B of this step, B from survivals so many steps old; 0: the forbidden one."""
    past: deque[Floats] = deque(maxlen=lag_steps + 1)

    def lengths(survival: Floats) -> Ints:
        past.append(survival)
        if len(past) <= lag_steps:
            return np.full(survival.shape[:-1], DRAFTS)
        return allot(survival, best_budget(past[0], STAIRS)[0])

    return lengths


@dataclass(slots=True)
class Requests:
    keys: NDArray[np.uint64]
    said: Ints
    """[requests, answer + drafts + 1]"""
    emitted: Ints
    last: Ints
    counts: Ints

    @classmethod
    def begin(cls, count: int, seed: int) -> Requests:
        keys = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)
        zeros = np.zeros(count, np.int64)
        said = np.zeros((count, ANSWER + DRAFTS + 1), np.int64)
        return cls(keys, said, zeros.copy(), zeros.copy(), np.zeros((count, VOCAB), np.int64))


def answers(process: Process, schedule: Schedule, *, coupled: bool, count: int, seed: int = 0) -> Ints:
    """[vocab^answer] how often each answer was given by `count` requests."""
    requests = Requests.begin(count, seed)
    while (requests.emitted < ANSWER).any():
        _step(requests, process, schedule, coupled=coupled)
    flat = np.ravel_multi_index(tuple(requests.said[:, :ANSWER].T), (VOCAB,) * ANSWER)
    return np.bincount(flat, minlength=VOCAB**ANSWER)


def _step(state: Requests, process: Process, schedule: Schedule, *, coupled: bool) -> None:
    drafts, q, odds = _draft(state, coupled=coupled)
    count = len(state.keys)
    survival = survivals(odds, np.ones(DRAFTS), np.full(count, DRAFTS))
    lengths = schedule(survival.reshape(-1, RANK_REQUESTS, DRAFTS)).reshape(-1)
    # Rows of all requests in a row, 1 + length each.
    first = np.cumsum(lengths + 1) - lengths - 1
    owner = np.repeat(np.arange(count), lengths + 1)
    place = np.arange(len(owner)) - first[owner]
    padded = np.concatenate((drafts, np.full((count, 1), -1)), axis=1)
    judged = place < lengths[owner]
    drafted = padded[owner, place]
    last = np.where(place > 0, padded[owner, place - 1], state.last[owner])
    shown = np.arange(DRAFTS) < place[:, None]
    counts = state.counts[owner]
    for column in range(DRAFTS):
        counts[np.arange(len(owner)), drafts[owner, column]] += shown[:, column]
    p = process(TARGET[last], counts, last)
    positions = state.emitted[owner] + place
    drawn = np.argmax(log(p) + gumbel(noise(state.keys[owner], positions, purpose=TARGET_DRAW, sub=0)), axis=-1)
    stands = np.zeros(len(owner), bool)
    if coupled:
        stands[judged] = drafted[judged] == drawn[judged]
    else:
        coins = noise(state.keys[owner], positions, purpose=ACCEPT_COIN, sub=0)[:, 0]
        at = np.flatnonzero(judged)
        own, column = owner[at], place[at]
        stands[at] = passes(p[at, drafted[at]], q[own, column, drafted[at]], coins[at])
    accepted = count_leading(stands, first)
    final = first + accepted
    bonus = drawn[final]
    if not coupled:
        failed = np.flatnonzero(accepted < lengths)
        weights = residual(p[final[failed]], q[failed, accepted[failed]])
        u = noise(state.keys[failed], positions[final[failed]], purpose=TARGET_DRAW, sub=0)
        bonus[failed] = np.argmax(log(weights) + gumbel(u), axis=-1)
    _commit(state, drafts, accepted, bonus)


def _draft(state: Requests, *, coupled: bool) -> tuple[Ints, Floats, Floats]:
    before, ids, laws, odds = state.last, [], [], []
    for column in range(DRAFTS):
        q = softmax(DRAFT[column, before])
        purpose, sub = (TARGET_DRAW, 0) if coupled else (DRAFT_DRAW, column)
        u = noise(state.keys, state.emitted + column, purpose=purpose, sub=sub)
        odds.append(LOG_ODDS[column, before])
        before = np.argmax(log(q) + gumbel(u), axis=-1)
        ids.append(before)
        laws.append(q)
    return np.stack(ids, axis=1), np.stack(laws, axis=1), np.stack(odds, axis=1)


def _commit(state: Requests, drafts: Ints, accepted: Ints, bonus: Ints) -> None:
    live = state.emitted < ANSWER
    for index in range(DRAFTS + 1):
        token = np.where(index < accepted, drafts[:, min(index, DRAFTS - 1)], bonus)
        rows = np.flatnonzero(live & (index <= accepted))
        state.said[rows, state.emitted[rows]] = token[rows]
        state.counts[rows, token[rows]] += 1
        state.emitted[rows] += 1
        state.last[rows] = token[rows]
