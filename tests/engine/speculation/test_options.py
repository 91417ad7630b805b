"""Settings that cannot work are refused by name, before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.engine_world import OPTIONS, RequestMaker, World, tiny_model
from whalepod.core.errors import ConfigError
from whalepod.engine.interface import Fidelity
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.calibration import Calibration
from whalepod.engine.speculation.cost_table import CostTable
from whalepod.engine.speculation.options import (
    TEMPERATURES_FILE,
    Acceptance,
    SpeculationOptions,
    Verification,
    speculation_for,
)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("draft_tokens", 0, "draft_tokens"),
        ("lag_steps", 0, "budget_lag"),
        ("gain_min", -0.1, "gain_min"),
        ("simulated_acceptance", 1.5, "simulate_acceptance"),
    ],
)
def test_a_bad_value_is_named(field: str, value: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SpeculationOptions(), **{field: value})  # type: ignore[arg-type]


def test_what_a_model_cannot_do_is_refused() -> None:
    config = tiny_model().config

    def check(options: SpeculationOptions, **changed: object) -> None:
        options.check(replace(config, **changed), weights="ab", slots=4)  # type: ignore[arg-type]

    check(SpeculationOptions())
    with pytest.raises(ConfigError, match="drafts 5 at most"):
        check(SpeculationOptions(draft_tokens=6))
    with pytest.raises(ConfigError, match="no confidence head"):
        check(SpeculationOptions(verification=Verification.SCHEDULED), enable_confidence_head=False)
    small = CostTable(bias=1, requests=[(1, 0)], rows=[(1, 0), (6, 1)], draft=[(1, 0)])
    with pytest.raises(ConfigError, match="ends at 6 rows"):
        check(SpeculationOptions(cost=small))
    short = Calibration([1.0], 100, [0], [0], [0.5], [0])
    with pytest.raises(ConfigError, match="for 1 drafts"):
        check(SpeculationOptions(calibration=short))


def test_an_engine_refuses_them_at_its_start() -> None:
    with pytest.raises(ConfigError, match="drafts 5 at most"):
        World(options=replace(OPTIONS, speculation=SpeculationOptions(draft_tokens=6)))


def test_by_default_a_model_drafts_what_it_can() -> None:
    config, wanted = tiny_model().config, SpeculationOptions()

    def drafts(asked: int | None, blocks: int = 3) -> int:
        ratios = config.compress_ratios[: config.num_hidden_layers + blocks]
        model = replace(config, num_nextn_predict_layers=blocks, compress_ratios=ratios)
        options = speculation_for(model, wanted, draft_tokens=asked, cost_table=None, temperature_table=None)
        return 0 if options is None else options.draft_tokens

    assert [drafts(None), drafts(3), drafts(0), drafts(None, blocks=0)] == [5, 3, 0, 0]
    with pytest.raises(ConfigError, match="cannot be read"):
        speculation_for(config, wanted, draft_tokens=None, cost_table=Path("missing.json"), temperature_table=None)


def test_the_temperatures_beside_a_model_are_taken_if_they_are_for_so_many_drafts(tmp_path: Path) -> None:
    config, wanted = tiny_model().config, SpeculationOptions()
    own = Calibration([1.0, 2.0], 100, [0, 0], [0, 0], [0.5, 0.5], [0, 0])
    named = Calibration([3.0, 4.0], 100, [0, 0], [0, 0], [0.5, 0.5], [0, 0])
    named.write(tmp_path / "named.json")

    def temperatures(drafts: int, table: Path | None = None) -> list[float] | None:
        options = speculation_for(
            config, wanted, draft_tokens=drafts, cost_table=None, temperature_table=table, directory=tmp_path
        )
        assert options is not None
        return None if options.calibration is None else list(options.calibration.temperatures)

    assert temperatures(2) is None
    own.write(tmp_path / TEMPERATURES_FILE)
    assert temperatures(2) == [1, 2]
    assert temperatures(3) is None
    assert temperatures(2, tmp_path / "named.json") == [3, 4]


def test_seeded_and_exact_requests_are_coupled_unless_rejection_is_asked_for() -> None:
    maker = RequestMaker(tiny_model())
    greedy = maker.request((3,), SamplingParams(temperature=0))
    seeded, exact = (maker.request((3,), SamplingParams(seed=seed)) for seed in (7, None))
    fast, free = (maker.request((3,), SamplingParams(seed=seed), fidelity=Fidelity.FAST) for seed in (7, None))
    auto, rejection, coupled = (SpeculationOptions(acceptance=each) for each in Acceptance)
    assert [auto.couples(each) for each in (greedy, seeded, fast, exact, free)] == [True, True, True, True, False]
    assert [rejection.couples(each) for each in (greedy, seeded, fast, free)] == [True, False, False, False]
    assert all(coupled.couples(each) for each in (greedy, seeded, fast, free))


def test_rejection_leaves_a_promised_answer_its_number_of_drafts() -> None:
    maker = RequestMaker(tiny_model())
    seeded, free = (maker.request((3,), SamplingParams(seed=seed)) for seed in (7, None))
    fast = maker.request((3,), SamplingParams(seed=7), fidelity=Fidelity.FAST)
    rejection = SpeculationOptions(acceptance=Acceptance.REJECTION, verification=Verification.SCHEDULED)
    assert [rejection.trims(each) for each in (seeded, free, fast)] == [False, True, True]
    assert all(SpeculationOptions().trims(each) for each in (seeded, free, fast))
