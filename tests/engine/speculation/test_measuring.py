"""What is measured is what the engine did."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.engine_world import prompt_of, tiny_model
from whalepod.core.errors import ConfigError
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.measuring import (
    CostPlan,
    collect_calibration,
    compare_ways,
    measure_cost,
    random_prompts,
)
from whalepod.engine.speculation.options import SpeculationOptions

SAMPLING = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)


def test_a_cost_table_covers_every_step_of_the_batch_it_is_for() -> None:
    said: list[str] = []
    plan = CostPlan(requests_max=3, draft_tokens=2, steps=4, prompt_tokens=4)
    table = measure_cost(tiny_model(), plan, say=said.append)
    table.check(model=tiny_model().weights, draft_tokens=2, requests_max=3)
    assert [count for count, _ in table.requests] == [1, 2, 3]
    assert (table.rows[0][0], table.rows_max) == (1, 9)
    assert all(seconds > 0 for _, seconds in table.draft)
    assert float(table.step_seconds(3, np.array(9))) > 0
    assert len(said) == 3 * 5 + 1


def test_a_calibration_needs_steps_that_verify_all_drafts() -> None:
    model, prompts = tiny_model(), [prompt_of(6, seed=seed) for seed in range(2)]
    with pytest.raises(ConfigError, match="at least 100"):
        collect_calibration(model, prompts, SAMPLING, draft_tokens=5, slots=2, say=lambda _: None)


@pytest.mark.slow
def test_a_calibration_does_not_make_confidences_worse() -> None:
    model, prompts = tiny_model(), [prompt_of(6, seed=seed) for seed in range(16)]
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True)
    table = collect_calibration(model, prompts, sampling, draft_tokens=3, slots=16, say=lambda _: None)
    table.check(model=model.weights, draft_tokens=3)
    assert table.samples > 100
    assert table.ece_after[0] <= table.ece_before[0]


def test_ways_say_the_same_and_are_told_apart() -> None:
    model = tiny_model()
    prompts = random_prompts(model, 2, tokens=5, seed=3)
    off, fixed, lucky = compare_ways(
        model,
        prompts,
        SAMPLING,
        [
            ("off", None),
            ("fixed", SpeculationOptions(draft_tokens=2)),
            ("lucky", SpeculationOptions(draft_tokens=2, simulated_acceptance=1.0)),
        ],
        slots=2,
    )
    assert off.counts is None
    assert fixed.counts is not None
    assert lucky.counts is not None
    assert lucky.counts.acceptance == pytest.approx([1, 1])
    assert lucky.counts.steps < 8
    assert all(each.tokens_per_second > 0 for each in (off, fixed, lucky))
