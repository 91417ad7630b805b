"""Which arithmetic the rows of a step get, and that it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, oracle, prompt_of
from whalepod.engine.device import LaunchedRows
from whalepod.engine.interface import Fidelity, SampledToken
from whalepod.engine.runner import RowLogits, StepRunner
from whalepod.kernels.native import library
from whalepod.kernels.numerics import ROW_TILE, tile_rows
from whalepod.model.draft import Anchor, Chooser, Drafts

TOKENS = (45, 60, 61)


class _Spy:
    """Notes how many rows a step had, and how many of a thousand a product would have taken at a time after it."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.left_behind: set[int] = set()

    def run(self, rows: Sequence[LaunchedRows]) -> Sequence[RowLogits | None]:
        results = self._runner.run(rows)
        self.left_behind.add(tile_rows(1000))
        return results

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        return self._runner.draft(anchors, choose, tokens)


def _answers(*fidelities: Fidelity) -> list[tuple[SampledToken, ...]]:
    """Of requests that are computed together, one after each of `TOKENS`."""
    spies: list[_Spy] = []

    def spied(runner: StepRunner) -> StepRunner:
        spies.append(_Spy(runner))
        return spies[0]

    world = World(options=replace(OPTIONS, prefix_reuse=False), instrument=spied)
    heard = [
        world.submit(world.request(prompt_of(tokens), fidelity=fidelity, shares=False))
        for tokens, fidelity in zip(TOKENS, fidelities, strict=True)
    ]
    world.run()
    assert spies[0].left_behind == {ROW_TILE}, "a step's arithmetic outlives it"
    return [tuple(each.tokens) for each in heard]


def test_one_exact_request_in_a_step_makes_every_row_of_it_exact() -> None:
    truth = [oracle(tokens, GREEDY) for tokens in TOKENS]
    assert _answers(Fidelity.FAST, Fidelity.EXACT, Fidelity.FAST) == truth


def test_fast_requests_among_themselves_differ_by_rounding() -> None:
    """Of the references: the compiled operators have one arithmetic."""
    with library.chosen(wanted=False):
        truth, fast = _answers(*[Fidelity.EXACT] * 3), _answers(*[Fidelity.FAST] * 3)
    assert fast != truth, "the other arithmetic was not chosen"
    for ours, theirs in zip(fast, truth, strict=True):
        assert [token.id for token in ours] == [token.id for token in theirs]
        assert np.allclose([token.logprob or 0 for token in ours], [token.logprob or 0 for token in theirs], atol=1e-3)


@pytest.mark.skipif(not library.available(), reason=f"no compiled operators: {library.REASON_MISSING}")
def test_fast_requests_get_the_bits_of_exact_ones_from_the_compiled_operators() -> None:
    with library.chosen(wanted=True):
        assert _answers(*[Fidelity.FAST] * 3) == _answers(*[Fidelity.EXACT] * 3)
