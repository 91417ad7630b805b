"""The same law, through the speculator, the sampler and the judge that serve; a table stands for the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.speculation.toy_model import (
    ANSWER,
    DRAFT,
    DRAFTS,
    LOG_ODDS,
    RANK_REQUESTS,
    STAIRS,
    TARGET,
    VOCAB,
    Floats,
    Ints,
    chi_square_p,
)
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.engine.sampling import DrawRow, Sampler, probabilities, process_rows
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.acceptance import Hearing, judge
from whalepod.engine.speculation.options import DraftSampling, SpeculationOptions, Verification
from whalepod.engine.speculation.scheduling import best_budget
from whalepod.engine.speculation.speculator import Candidate, Round, Speculator
from whalepod.model.draft import Anchor, Chooser, Drafts

SAMPLES, BATCH = 40_000, 40
COST = replace(STAIRS, rows=[(BATCH // RANK_REQUESTS * rows, seconds) for rows, seconds in STAIRS.rows])
PARAMS = {
    "plain": SamplingParams(temperature=0.8, ignore_eos=True),
    "top-p": SamplingParams(top_p=0.8, ignore_eos=True),
    "penalties": SamplingParams(presence_penalty=0.4, frequency_penalty=0.6, repetition_penalty=1.5, ignore_eos=True),
    "grammar": SamplingParams(ignore_eos=True),
}
END = VOCAB + 1


def allowed(kind: str, last: int) -> np.ndarray | None:
    flags = np.arange(VOCAB) != (last + 1) % VOCAB
    return flags if kind == "grammar" else None


def draft_table(anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
    before, ids, odds = np.array([anchor.token_id for anchor in anchors]), [], []
    for column in range(tokens):
        odds.append(torch.from_numpy(LOG_ODDS[column, before]))
        chosen = choose(column, torch.from_numpy(DRAFT[column, before].astype(np.float32)))
        before = chosen.numpy()
        ids.append(chosen)
    drafted = torch.stack(ids, dim=1)
    return Drafts(drafted, torch.zeros(*drafted.shape, 0), torch.stack(odds, dim=1))


class Saying:
    """One request, until it has said enough."""

    def __init__(self, params: SamplingParams, key: int) -> None:
        self.sampler = Sampler(params, key=key, eos_id=END, prompt_ids=(0,))
        self.ids = [0]

    def candidate(self) -> Candidate:
        anchor = Anchor(slot=0, position=len(self.ids) - 1, token_id=self.ids[-1])
        return Candidate(self.sampler, anchor, drafts_max=DRAFTS, coupled=False, trims=True)

    def hearing(self, kind: str, drafts: tuple[int, ...], laws: np.ndarray | None) -> Hearing:
        lasts = [self.ids[-1], *drafts]
        flags = [row for last in lasts if (row := allowed(kind, last)) is not None]
        return Hearing(self.sampler, len(self.ids), TARGET[lasts].astype(np.float32), drafts, laws, flags)

    def hear(self, ids: Sequence[int]) -> None:
        self.ids += ids
        for token_id in ids:
            self.sampler.observe(token_id)


def batch_answers(kind: str, speculator: Speculator, keys: Sequence[int]) -> list[tuple[int, ...]]:
    """All requests of a batch to their ends; budgets are of survivals two steps old."""
    batch = [Saying(PARAMS[kind], key) for key in keys]
    past: list[Floats] = []
    while any(len(each.ids) <= ANSWER for each in batch):
        scheduled = speculator.options.verification is Verification.SCHEDULED
        budget = int(best_budget(past[-2], COST)[0]) if scheduled and len(past) >= 2 else None
        round_ = speculator.propose([each.candidate() for each in batch], budget)
        assert isinstance(round_, Round)
        assert round_.survival is not None
        past.append(round_.survival)
        hearings = [
            each.hearing(kind, proposal.drafts, proposal.laws)
            for each, proposal in zip(batch, round_.proposals, strict=True)
        ]
        for each, said in zip(batch, judge(hearings), strict=True):
            each.hear([token.id for token in said])  # type: ignore[union-attr]
    return [tuple(each.ids[1 : ANSWER + 1]) for each in batch]


def law(kind: str) -> Floats:
    """[vocab^answer] by the sampler's own probabilities."""
    found = np.zeros((VOCAB,) * ANSWER)
    for answer in np.ndindex(*found.shape):
        sampler, last, probability = Sampler(PARAMS[kind], key=0, eos_id=END, prompt_ids=(0,)), 0, 1.0
        for place, token in enumerate(answer):
            row = DrawRow(sampler, 1 + place, allowed=allowed(kind, last))
            probability *= probabilities(process_rows(TARGET[[last]].astype(np.float32), [row]))[0, token]
            sampler.observe(token)
            last = token
        found[answer] = probability
    return found.ravel()


CASES = [
    *((kind, Verification.SCHEDULED, DraftSampling.SAMPLE) for kind in PARAMS),
    ("top-p", Verification.FIXED, DraftSampling.SAMPLE),
    ("penalties", Verification.SCHEDULED, DraftSampling.GREEDY),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "verification", "draft_sampling"), CASES)
def test_rejection_keeps_the_samplers_law(kind: str, verification: Verification, draft_sampling: DraftSampling) -> None:
    options = SpeculationOptions(draft_tokens=DRAFTS, verification=verification, draft_sampling=draft_sampling)
    speculator = Speculator(options, draft_table, clock=SYSTEM_CLOCK)
    keys = np.random.default_rng(5).integers(0, 2**63, SAMPLES).tolist()
    counts: Ints = np.zeros(VOCAB**ANSWER, np.int64)
    for start in range(0, SAMPLES, BATCH):
        for answer in batch_answers(kind, speculator, keys[start : start + BATCH]):
            counts[np.ravel_multi_index(answer, (VOCAB,) * ANSWER)] += 1
    assert chi_square_p(counts, SAMPLES * law(kind)) > 1e-3


def test_a_grammars_law_leaves_out_what_it_forbids() -> None:
    assert law("grammar").sum() == pytest.approx(1)
    assert (law("grammar") == 0).sum() > 0
