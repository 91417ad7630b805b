"""Which drafts stand, and what is said after them (`runtime.md` §2.6).

A request that verifies v drafts has v + 1 rows of logits; row i judges draft i + 1, the last row none.

Rejection: draft x, drawn from q, stands with probability min(1, p(x) / q(x)); at the first that does not, a token of
max(p − q, 0) is drawn instead, and behind the last draft one of p. What is said has the law p whatever q was.
Coupled: every row draws its token as if there were no drafts, and a draft stands if it is that token. What is said is
then a function of the noise alone, drafts or none. Greedy requests are coupled: they know no noise.

Rows are looked at one after another, those of all requests at once: what is behind a draft that fell costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whalepod.core.errors import InternalError, ServingError
from whalepod.engine.device_sampling import Group, draw_groups
from whalepod.engine.grammar.masks import Flags
from whalepod.engine.interface import SampledToken
from whalepod.engine.noise import ACCEPT_COIN, noise_words, uniform_of
from whalepod.engine.runner import RowLogits, on_host
from whalepod.engine.sampling import (
    VALUES_AT_ONCE,
    DrawRow,
    Ids,
    Logits,
    Sampler,
    are_numbers,
    draw_ids,
    draw_rows,
    probabilities,
    process_rows,
    report_tokens,
)

log = logging.getLogger(__name__)

Probabilities = NDArray[np.floating[Any]]
Said = tuple[SampledToken | ServingError, ...]
"""What a request says in a step: tokens in order, at least one, or the last of it is why there is no further one."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """The rows of one request. Its sampler has observed every token before `position`."""

    sampler: Sampler
    position: int
    """Of the token after the first row."""
    logits: RowLogits
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

    @property
    def reachable(self) -> range:
        """Places before the first dead end."""
        places = range(1 + len(self.drafts))
        return range(next((place for place in places if self.dead_end(place) is not None), len(places)))

    def dead_end(self, place: int) -> ServingError | None:
        """Why nothing may follow here."""
        allowed = self.allowed[place] if place < len(self.allowed) else None
        if isinstance(allowed, ServingError):
            return allowed
        return self.sampler.dead_end(self.drafts[:place], allowed, vocab_size=self.logits.shape[1])


def judge(hearings: Sequence[Hearing], *, simulated: float | None = None) -> list[Said]:
    """What each request says. Counts no token: call `observe`.

    `simulated`: not what drafts are decides whether they stand but a coin of this bias. For measuring; answers are
    nonsense.
    """
    groups = {
        index: Group(each.logits, [each.row(place) for place in each.reachable])
        for index, each in enumerate(hearings)
        if isinstance(each.logits, Tensor) and each.laws is None and simulated is None
    }
    # Coupled requests whose logits are on a GPU: all their rows are drawn at once.
    drawn = iter(draw_groups(list(groups.values())))
    others = [replace(each, logits=on_host(each.logits)) for i, each in enumerate(hearings) if i not in groups]
    judged = iter(_judge_on_host(others, simulated))
    return [_said(each, next(drawn)) if i in groups else next(judged) for i, each in enumerate(hearings)]


def _said(hearing: Hearing, tokens: Sequence[SampledToken | InternalError]) -> Said:
    """Up to the first token that is not the draft there."""
    for place, token in enumerate(tokens):
        draft = hearing.drafts[place] if place < len(hearing.drafts) else None
        if isinstance(token, InternalError) or token.id != draft:
            return tuple(tokens[: place + 1])
    error = hearing.dead_end(len(tokens))
    assert error is not None, "the last row has no draft"
    return (*tokens, error)


def _judge_on_host(hearings: Sequence[Hearing], simulated: float | None) -> list[Said]:
    said: list[list[SampledToken | ServingError]] = [[] for _ in hearings]
    going, place = _without_dead_ends(hearings, range(len(hearings)), 0, said), 0
    plain = [index for index in going if not hearings[index].drafts]
    if plain:
        logits = np.stack([hearings[index].logits[0] for index in plain])
        for index, token in zip(plain, draw_rows(logits, [hearings[index].row(0) for index in plain]), strict=True):
            said[index].append(token)
        going = [index for index in going if hearings[index].drafts]
    while going:
        on: list[int] = []
        at_once = max(1, VALUES_AT_ONCE // hearings[going[0]].logits.shape[1])
        for start in range(0, len(going), at_once):
            on += _judge_row(hearings, going[start : start + at_once], place, said, simulated)
        place += 1
        going = _without_dead_ends(hearings, on, place, said)
    return [tuple(tokens) for tokens in said]


def judge_isolated(hearings: Sequence[Hearing], *, simulated: float | None = None) -> list[Said | Exception]:
    """As `judge`; an error for exactly those requests whose tokens cannot be drawn. A broken invariant is raised."""
    try:
        return [*judge(hearings, simulated=simulated)]
    except AssertionError:
        raise  # it stops the rank
    except Exception as error:
        if len(hearings) == 1:
            log.exception("the tokens of a request cannot be drawn")
            return [error]
    log.warning("drawing failed, each request's tokens are drawn alone", extra={"requests": len(hearings)})
    return [said for hearing in hearings for said in judge_isolated([hearing], simulated=simulated)]


def _without_dead_ends(
    hearings: Sequence[Hearing],
    going: Sequence[int],
    place: int,
    said: Sequence[list[SampledToken | ServingError]],
) -> list[int]:
    on: list[int] = []
    for index in going:
        error = hearings[index].dead_end(place)
        if error is None:
            on.append(index)
        else:
            said[index].append(error)
    return on


def _judge_row(
    hearings: Sequence[Hearing],
    going: Sequence[int],
    place: int,
    said: Sequence[list[SampledToken | ServingError]],
    simulated: float | None,
) -> list[int]:
    """One more token of each; those whose draft stood go on."""
    logits = np.stack([hearings[index].logits[place] for index in going])
    good = are_numbers(logits)
    for index in np.array(going)[~good].tolist():
        said[index].append(InternalError("the model produced logits that are no numbers"))
    going = np.array(going)[good].tolist()
    if not going:
        return []
    logits = logits[good]
    rows = [hearings[index].row(place) for index in going]
    judging = [hearings[index] for index in going]
    drafts = np.array([each.drafts[place] if place < len(each.drafts) else -1 for each in judging], np.int64)
    laws = [each.laws[place] if place < len(each.drafts) and each.laws is not None else None for each in judging]
    ids, stands = _tokens(process_rows(logits, rows), rows, drafts, laws, simulated)
    for index, token in zip(going, report_tokens(logits, rows, ids), strict=True):
        said[index].append(token)
    return [index for index, stood in zip(going, stands, strict=True) if stood]


def _tokens(
    weights: Logits,
    rows: Sequence[DrawRow],
    drafts: Ids,
    laws: Sequence[Logits | None],
    simulated: float | None,
) -> tuple[Ids, NDArray[np.bool_]]:
    """[rows] the token of each row, and whether it is a draft that stands. `drafts` [rows], −1 where there is none."""
    stands = np.zeros(len(drafts), np.bool_)
    by_law = [index for index, law in enumerate(laws) if law is not None]
    if simulated is not None:
        stands = (drafts >= 0) & (_coins(rows) < simulated)
    elif by_law:
        p, q = probabilities(weights[by_law]), probabilities(np.stack([law for law in laws if law is not None]))
        own, drawn = np.arange(len(by_law)), drafts[by_law]
        stands[by_law] = passes(p[own, drawn], q[own, drawn], _coins([rows[index] for index in by_law]))
        with np.errstate(divide="ignore"):
            weights[by_law] = np.log(residual(p, q))
    ids = drafts.copy()
    fell = np.flatnonzero(~stands)
    if len(fell):
        ids[fell] = draw_ids(weights[fell], [rows[index] for index in fell.tolist()])
    if simulated is None:
        coupled = np.ones(len(drafts), np.bool_)
        coupled[by_law] = False
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
