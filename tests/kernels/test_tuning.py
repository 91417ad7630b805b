"""What the tuner tries, what it takes for right, and what it chooses: with times that are made up, and kernels that run
in Triton's interpreter. `test_kernels_on_gpu.py` lets it measure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.core.errors import ConfigError
from whalepod.kernels import tuning, tuning_cases
from whalepod.kernels.launch_sizes import Lines, Sizes, launch_sizes
from whalepod.kernels.tunable_kernels import TUNABLES, Tunable
from whalepod.kernels.tuning import FINAL_ROUNDS, agrees, candidates, choose, ranges, tune, tune_case, with_sizes
from whalepod.kernels.tuning_cases import Call, Case, cases

ONE, TWO, FOUR, EIGHT = ({"num_warps": warps} for warps in (1, 2, 4, 8))


# ------------------------------------------------------------------------------------------------------- choosing


def test_candidates_differ_from_todays_sizes_in_two_at_most_and_todays_come_first() -> None:
    tunable = Tunable({"A": (1, 2), "B": (1, 2, 3), "C": (5, 6)})
    present = {"A": 1, "B": 2, "C": 5}
    first, *others = candidates(tunable, present)
    assert first == present
    assert len(others) == len({tuple(sizes.items()) for sizes in others}) == (1 + 2 + 1) + (2 + 1 + 2)
    assert {"A": 2, "B": 1, "C": 6} not in others
    assert all(sum(sizes[name] != present[name] for name in sizes) == 1 for sizes in others[:4])


def times(*, quick: dict[int, float], final: dict[int, list[float]]) -> Callable[[Sizes, int], float]:
    """µs by `num_warps`: at first sight, and in each of the last rounds."""
    left = {warps: list(series) for warps, series in final.items()}

    def measure(sizes: Sizes, repeats: int) -> float:
        warps = sizes["num_warps"]
        return quick[warps] if repeats == tuning.QUICK_REPEATS else left[warps].pop(0)

    return measure


def test_the_quickest_wins_by_the_median_of_turns_with_todays() -> None:
    final = {
        4: [10.0] * FINAL_ROUNDS,
        1: [9.0, 99.0, 9.0],
        2: [9.5] * FINAL_ROUNDS,
        8: [11.0] * FINAL_ROUNDS,
    }
    choice = choose(FOUR, [ONE, TWO, EIGHT], times(quick={1: 9, 2: 9.5, 8: 11}, final=final))
    assert (choice.sizes, choice.us, choice.present_us) == (ONE, 9.0, 10.0)


@pytest.mark.parametrize(("us", "wins"), [(9.8, False), (9.72, False), (9.70, True), (10.5, False)])
def test_todays_sizes_stay_unless_others_win_clearly(us: float, wins: bool) -> None:
    final = {4: [10.0] * FINAL_ROUNDS, 1: [us] * FINAL_ROUNDS}
    choice = choose(FOUR, [ONE], times(quick={1: 1.0}, final=final))
    assert choice.sizes == (ONE if wins else FOUR)
    assert choice.us == (us if wins else 10.0)


def test_todays_sizes_stay_if_nothing_else_can_be_launched() -> None:
    assert choose(FOUR, [], times(quick={}, final={4: [10.0] * FINAL_ROUNDS})).sizes == FOUR


def test_only_the_best_at_first_sight_take_turns() -> None:
    """Eight warps are slow at first sight, and have no time in the last rounds to be asked for."""
    quick = {warps: float(warps) for warps in (1, 2, 3, 8)}
    final = {warps: [float(warps)] * FINAL_ROUNDS for warps in (1, 2, 3, 4)}
    others = [EIGHT, {"num_warps": 3}, TWO, ONE]
    assert choose(FOUR, others, times(quick=quick, final=final)).sizes == ONE


# -------------------------------------------------------------------------------------------------------- tables


def test_a_number_of_rows_stands_for_those_up_to_halfway_to_its_neighbours() -> None:
    assert list(ranges((48,))) == [(0, None)]
    assert list(ranges((4, 16, 100))) == [(0, 9), (9, 41), (41, None)]


@pytest.mark.parametrize(
    ("low", "high", "sizes", "wanted"),
    [
        (0, None, EIGHT, {0: EIGHT}),
        (0, 50, EIGHT, {0: EIGHT, 50: FOUR, 100: TWO}),
        (0, 100, EIGHT, {0: EIGHT, 100: TWO}),
        (0, 200, EIGHT, {0: EIGHT, 200: TWO}),
        (50, 150, EIGHT, {0: FOUR, 50: EIGHT, 150: TWO}),
        (100, None, EIGHT, {0: FOUR, 100: EIGHT}),
        (300, None, EIGHT, {0: FOUR, 100: TWO, 300: EIGHT}),
        (50, 100, TWO, {0: FOUR, 50: TWO}),
        (100, None, FOUR, {0: FOUR}),
    ],
)
def test_a_win_changes_the_lines_of_its_own_rows_alone(
    low: int, high: int | None, sizes: Sizes, wanted: dict[int, Sizes]
) -> None:
    lines = with_sizes(Lines((0, 100), (FOUR, TWO), exact=ONE), low, high, sizes)
    assert dict(zip(lines.rows_min, lines.sizes, strict=True)) == wanted
    assert lines.exact == ONE, "what `exact` takes is not for the tuner to change"


# --------------------------------------------------------------------------------------------------------- a case


@pytest.fixture(autouse=True)
def small_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small = {"DEVICE": torch.device("cpu"), "D": 64, "COLUMNS": 64, "EXPERTS": 4, "CHOICES": 2, "EXPERT_BYTES": 1 << 28}
    small |= {"ENTRIES": 1024, "BLOCK": 64, "INDEX_HEADS": 8, "WIDTH": 64, "HEADS": 16, "PAIRS": 16, "CHOSEN": 32}
    for name, value in small.items():
        monkeypatch.setattr(tuning_cases, name, value)
    cached = (tuning_cases._index_world, tuning_cases._attention_pools, tuning_cases._expert_weights)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("major", [9, 10])
def test_every_tunable_kernel_that_a_chip_launches_has_a_case(major: int) -> None:
    named = {case.kernel for case in cases(major)}
    assert set(TUNABLES) - named == ({"index_scores", "sparse_attention"} if major == 9 else {
        "index_scores_hopper", "sparse_attention_hopper"})  # fmt: skip


@pytest.mark.parametrize("case", cases(9), ids=lambda case: f"{case.kernel} {case.shape}")
def test_every_case_computes_the_same_again_and_another_thing_for_another_seed(case: Case) -> None:
    rows = 2 if case.kernel == "expert_tiles" else 12
    one, again, other = (parts(case.make(rows, seed)()) for seed in (0, 0, 1))
    assert all(torch.equal(first, second) for first, second in zip(one, again, strict=True))
    if case.kernel not in ("index_scores_hopper", "candidate_scores"):
        assert not all(torch.equal(first, second) for first, second in zip(one, other, strict=True))


def parts(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


SWIGLU = {"ROWS": 8, "COLUMNS": 256, "num_warps": 8}
LINES = Lines((0,), (SWIGLU,))


def case_of(name: str, *, row_bytes: int = 1 << 28) -> Case:
    (case,) = [case for case in cases(9) if case.kernel == name]
    return Case(name, (4, 16, 64), case.make, row_bytes)


def test_a_case_is_launched_with_each_size_in_turn_and_the_winner_is_written() -> None:
    """Programs of two rows are quickest at four rows, and of 128 columns at 16. Nobody asks at 64."""
    tried, before = list[Sizes](), launch_sizes("swiglu", torch.empty(0), rows=4)

    def works(sizes: Sequence[Sizes]) -> list[bool]:
        tried.extend(sizes)
        return [one["num_warps"] != 4 for one in sizes]

    def time_us(calls: Sequence[Call], repeats: int) -> float:
        (rows, _) = parts(calls[0]())[0].shape
        sizes = launch_sizes("swiglu", torch.empty(0), rows=rows)
        assert sizes["num_warps"] != 4, "it could not be launched"
        return 1.0 if (sizes["ROWS"] == 2 if rows == 4 else sizes["COLUMNS"] == 128) else 2.0

    lines, tuned = tune_case(case_of("swiglu"), (4, 16), LINES, works=works, time_us=time_us)
    assert [lines.pick(rows, exact=False)["ROWS"] for rows in (0, 8, 9, 99)] == [2, 2, 8, 8]
    assert [lines.pick(rows, exact=False)["COLUMNS"] for rows in (8, 9, 32, 33)] == [256, 128, 128, 256]
    assert [(one.rows, one.changed, one.choice.present_us) for one in tuned] == [(4, True, 2.0), (16, True, 2.0)]
    assert SWIGLU in tried
    assert all(one.dropped == sum(sizes["num_warps"] == 4 for sizes in tried) for one in tuned)
    assert launch_sizes("swiglu", torch.empty(0), rows=4) == before, "nothing stays forced"


def test_where_todays_sizes_cannot_be_launched_the_first_that_can_take_their_place() -> None:
    lines, (tuned,) = tune_case(
        case_of("swiglu"),
        (4,),
        LINES,
        works=lambda sizes: [one["COLUMNS"] == 128 for one in sizes],
        time_us=lambda calls, repeats: 1.0,
    )
    wanted = {**SWIGLU, "COLUMNS": 128}
    assert tuned.changed
    assert (lines.pick(4, exact=False), lines.pick(9, exact=False)) == (wanted, SWIGLU)


def test_sizes_with_other_results_are_dropped_untimed() -> None:
    """Here a program of 128 columns adds something up in another order."""

    def make(rows: int, seed: int) -> Call:
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed))
        return lambda: x * (1 + 1e-6) if launch_sizes("swiglu", x, rows=rows)["COLUMNS"] == 128 else x.clone()

    timed: set[int] = set()

    def time_us(calls: Sequence[Call], repeats: int) -> float:
        timed.add(launch_sizes("swiglu", torch.empty(0), rows=4)["COLUMNS"])
        return 1.0

    case = Case("swiglu", (4,), make, 1 << 28)
    _, (tuned,) = tune_case(case, (4,), LINES, works=lambda sizes: [True] * len(sizes), time_us=time_us)
    assert timed == {256, 512}
    assert tuned.dropped == sum(sizes["COLUMNS"] == 128 for sizes in candidates(TUNABLES["swiglu"], SWIGLU))


def test_kernels_that_change_no_bits_must_not_and_others_by_rounding_only() -> None:
    wanted = torch.randn(100, generator=torch.Generator().manual_seed(0))
    exact, loose = Tunable({}), Tunable({}, changes_bits=True)
    assert agrees(exact, [wanted], [wanted.clone()])
    assert not agrees(exact, [wanted, wanted], [wanted, wanted * (1 + 1e-6)])
    assert agrees(loose, [wanted * (1 + 1e-6)], [wanted])
    assert not agrees(loose, [wanted * 1.01], [wanted])
    assert not agrees(loose, [wanted.where(wanted < 1, torch.nan)], [wanted])


def test_without_a_gpu_or_with_an_unknown_kernel_it_says_so() -> None:
    with pytest.raises(ConfigError, match="softmax is no kernel whose sizes are tuned; those are attention_rows"):
        tune(["softmax"], [], None)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a GPU"):
            tune([], [], None)
