"""Which drafts stand, and what is said after them (`runtime.md` §2.6).

A request that verifies v drafts has v + 1 rows of logits; row i judges draft i + 1, the last row none.

Rejection: draft x, drawn from q, stands with probability min(1, p(x) / q(x)); at the first that does not, a token of
max(p − q, 0) is drawn instead, and behind the last draft one of p. What is said has the law p whatever q was.
Coupled: every row draws its token as if there were no drafts, and a draft stands if it is that token. What is said is
then a function of the noise alone, drafts or none. Greedy requests are coupled: they know no noise.

Rows are looked at one after another, those of all requests at once: what is behind a draft that fell costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import InternalError, ServingError
from whalepod.engine.grammar.masks import Flags
from whalepod.engine.interface import SampledToken
from whalepod.engine.noise import ACCEPT_COIN, noise_words, uniform_of
from whalepod.engine.sampling import (
    VALUES_AT_ONCE,
    DrawRow,
    Ids,
    Logits,
    Sampler,
    are_numbers,
    draw_ids,
    probabilities,
    process_rows,
    report_tokens,
)

Probabilities = NDArray[np.floating[Any]]
Said = tuple[SampledToken | ServingError, ...]
"""What a request says in a step: tokens in order, at least one, or the last of it is why there is no further one."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """The rows of one request. Its sampler has observed every token before `position`."""

    sampler: Sampler
    position: int
    """Of the token after the first row."""
    logits: Logits
    """[1 + drafts, vocab]"""
    drafts: Sequence[int] = ()
    laws: Logits | None = None
    """[drafts, vocab] log-weights that each draft was drawn from; None: they are judged by coupling."""
    allowed: Sequence[Flags | ServingError] = ()
    """What a grammar lets follow each row, or why nothing may. Rows without are free, or what they say is dropped,
    because the grammar has ended before."""

    def row(self, place: int) -> DrawRow:
        allowed = self.allowed[place] if place < len(self.allowed) else None
        assert not isinstance(allowed, ServingError)
        return DrawRow(self.sampler, self.position + place, drafts=self.drafts[:place], allowed=allowed)

    def error(self, place: int) -> ServingError | None:
        if place < len(self.allowed) and isinstance(error := self.allowed[place], ServingError):
            return error
        if not are_numbers(self.logits[place : place + 1])[0]:
            return InternalError("the model produced logits that are no numbers")
        return None


def judge(hearings: Sequence[Hearing], *, simulated: float | None = None) -> list[Said]:
    """What each request says. Counts no token: call `observe`.

    `simulated`: not what drafts are decides whether they stand but a coin of this bias. For measuring; answers are
    nonsense.
    """
    said: list[list[SampledToken | ServingError]] = [[] for _ in hearings]
    going, place = list(range(len(hearings))), 0
    while going:
        on: list[int] = []
        at_once = max(1, VALUES_AT_ONCE // hearings[going[0]].logits.shape[1])
        for start in range(0, len(going), at_once):
            on += _judge_row(hearings, going[start : start + at_once], place, said, simulated)
        going, place = on, place + 1
    return [tuple(tokens) for tokens in said]


@dataclass(slots=True)
class _Rows:
    """Row `place` of some requests."""

    members: list[int] = field(default_factory=list[int])
    rows: list[DrawRow] = field(default_factory=list[DrawRow])
    drafts: list[int | None] = field(default_factory=list[int | None])
    laws: list[Logits | None] = field(default_factory=list[Logits | None])


def _judge_row(
    hearings: Sequence[Hearing],
    going: Sequence[int],
    place: int,
    said: Sequence[list[SampledToken | ServingError]],
    simulated: float | None,
) -> list[int]:
    """One more token of each; those whose draft stood go on."""
    all_rows = _Rows()
    for index in going:
        hearing = hearings[index]
        error = hearing.error(place)
        if error is not None:
            said[index].append(error)
            continue
        judges = place < len(hearing.drafts)
        all_rows.members.append(index)
        all_rows.rows.append(hearing.row(place))
        all_rows.drafts.append(hearing.drafts[place] if judges else None)
        all_rows.laws.append(hearing.laws[place] if judges and hearing.laws is not None else None)
    if not all_rows.members:
        return []
    logits = np.stack([hearings[index].logits[place] for index in all_rows.members])
    ids, stands = _tokens(process_rows(logits, all_rows.rows), all_rows, simulated)
    for index, token in zip(all_rows.members, report_tokens(logits, all_rows.rows, ids), strict=True):
        said[index].append(token)
    return [index for index, stood in zip(all_rows.members, stands, strict=True) if stood]


def _tokens(weights: Logits, rows: _Rows, simulated: float | None) -> tuple[Ids, NDArray[np.bool_]]:
    """[rows] the token of each row, and whether it is a draft that stands."""
    drafts = np.array([-1 if draft is None else draft for draft in rows.drafts], np.int64)
    stands = np.zeros(len(drafts), np.bool_)
    if simulated is not None:
        stands = (drafts >= 0) & (_coins(rows.rows) < simulated)
    else:
        by_law = [index for index, law in enumerate(rows.laws) if law is not None]
        if by_law:
            laws = np.stack([law for law in rows.laws if law is not None])
            p, q = probabilities(weights[by_law]), probabilities(laws)
            own, drawn = np.arange(len(by_law)), drafts[by_law]
            coins = _coins([rows.rows[index] for index in by_law])
            stands[by_law] = passes(p[own, drawn], q[own, drawn], coins)
            with np.errstate(divide="ignore"):
                weights[by_law] = np.log(residual(p, q))
    ids = drafts.copy()
    open_rows = np.flatnonzero(~stands)
    if len(open_rows):
        ids[open_rows] = draw_ids(weights[open_rows], [rows.rows[index] for index in open_rows])
    if simulated is None:
        coupled = np.array([law is None for law in rows.laws])
        stands |= coupled & (ids == drafts)
    return ids, stands


def _coins(rows: Sequence[DrawRow]) -> NDArray[np.float64]:
    """[rows] in (0, 1), one for each request and position."""
    words = noise_words(
        np.array([row.sampler.key for row in rows], np.uint64),
        positions=np.array([row.position for row in rows], np.uint64),
        lanes=1,
        purpose=ACCEPT_COIN,
    )
    return uniform_of(words)[:, 0]


def passes(p_of_draft: Probabilities, q_of_draft: Probabilities, coins: Probabilities) -> NDArray[np.bool_]:
    """[drafts] whether each would stand, had all before it stood. `coins` in (0, 1)."""
    assert (q_of_draft > 0).all(), "a draft was drawn that could not be"
    return coins * q_of_draft < p_of_draft


def residual(p: Probabilities, q: Probabilities) -> Probabilities:
    """[…, vocab] what to draw from where a draft from q did not stand, not normalised. Rows in which rounding has left
    nothing are p."""
    left = np.maximum(p - q, 0)
    return np.where(left.sum(axis=-1, keepdims=True) > 0, left, p)
