"""Which sizes a launch gets, for how many rows and on which chip; tables that are malformed, and the repository's."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.house_rules import ROOT
from whalepod.core.errors import ConfigError
from whalepod.engine.rank_model import set_arithmetic
from whalepod.kernels import launch_sizes as launch_sizes_module
from whalepod.kernels.launch_sizes import (
    FOLDER,
    LaunchTable,
    exact_fingerprint,
    forced,
    launch_sizes,
    nearest,
    parse_table,
    read_table,
    repository_tables,
    sizes_by_shape,
    use_table,
    write_table,
)
from whalepod.kernels.numerics import whole_batches
from whalepod.kernels.tunable_kernels import TUNABLES

HERE = torch.empty(0)
FEW, MANY, EXACT = {"num_warps": 2}, {"num_warps": 8}, {"num_warps": 4}


@pytest.fixture
def given(tmp_path: Path) -> Iterator[Path]:
    """A table of one kernel, whose exact sizes are those of the repository."""
    file = tmp_path / "sm_90.json"
    file.write_text(json.dumps(table()))
    with patch.dict(launch_sizes_module._given):
        yield file
    launch_sizes_module.sizes_by_shape.cache_clear()


def table(kernels: Any = None, **fields: Any) -> dict[str, Any]:
    kernels = {"rms_norm": {"any": {"exact": EXACT, "0": FEW, "100": MANY}}} if kernels is None else kernels
    return {"architecture": 90, "measured_on": "a chip", "kernels": kernels} | fields


def parsed(kernels: Any = None, **fields: Any) -> LaunchTable:
    return parse_table(json.dumps(table(kernels, **fields)))


@pytest.mark.parametrize(("rows", "sizes"), [(0, FEW), (1, FEW), (99, FEW), (100, MANY), (1 << 20, MANY)])
def test_a_line_holds_from_its_number_of_rows_on(rows: int, sizes: dict[str, int]) -> None:
    lines = parsed().kernels["rms_norm"]["any"]
    assert lines.pick(rows, exact=False) == sizes
    assert lines.pick(rows, exact=True) == EXACT


def test_sizes_that_change_no_bits_are_for_exact_requests_too() -> None:
    lines = parsed({"mhc_expand": {"any": {"0": {"BLOCK": 512, "num_warps": 4}}}}).kernels["mhc_expand"]["any"]
    assert lines.pick(7, exact=True) == lines.pick(7, exact=False)


def test_lines_may_stand_in_any_order() -> None:
    lines = {"exact": EXACT, "1000": EXACT, "0": FEW, "200": MANY}
    picked = parsed({"rms_norm": {"any": lines}}).kernels["rms_norm"]["any"]
    assert [picked.pick(rows, exact=False) for rows in (199, 200, 1000)] == [FEW, MANY, EXACT]


@pytest.mark.parametrize(
    ("architecture", "wanted"), [(75, 90), (89, 90), (90, 90), (99, 90), (100, 100), (120, 100), (None, 90)]
)
def test_a_chip_without_a_table_takes_that_of_the_nearest_one(architecture: int | None, wanted: int) -> None:
    assert nearest(architecture, {number: parsed(architecture=number) for number in (90, 100)}).architecture == wanted


def test_a_table_that_was_not_measured_goes_before_the_nearest_one_for_what_it_names() -> None:
    attention, norm = "sparse_attention", "rms_norm"
    assert sizes_by_shape(100)[attention] == repository_tables()[100].kernels[attention]
    assert sizes_by_shape(103)[attention] == sizes_by_shape(100)[attention], "what a chip has room for, its family has"
    assert (
        sizes_by_shape(103)[norm] == sizes_by_shape(100)[norm] == sizes_by_shape(90)[norm] == sizes_by_shape(75)[norm]
    )


@pytest.mark.parametrize(("capability", "noted"), [((8, 9), 1), ((9, 0), 0), ((10, 0), 1), ((10, 3), 1)])
def test_a_chip_that_nobody_has_measured_is_noted_once(capability: tuple[int, int], noted: int) -> None:
    launch_sizes_module._on_gpu.cache_clear()
    with (
        patch.object(torch.cuda, "get_device_capability", lambda _: capability),
        patch.object(launch_sizes_module, "note_fallback") as note,
    ):
        for _ in range(3):
            launch_sizes_module._on_gpu(torch.device("cuda"))
    launch_sizes_module._on_gpu.cache_clear()
    assert note.call_count == noted
    assert all("whalepod kernels tune" in call.args[1] for call in note.call_args_list)


def test_a_table_that_is_given_goes_before_the_repositorys_and_leaves_its_other_kernels(given: Path) -> None:
    before = sizes_by_shape(90)
    use_table(given, 90)
    assert sizes_by_shape(90)["rms_norm"]["any"].pick(1, exact=False) == FEW
    assert {**sizes_by_shape(90), "rms_norm": None} == {**before, "rms_norm": None}
    assert sizes_by_shape(100) == {**sizes_by_shape(90), **repository_tables()[100].kernels, **sizes_by_shape(100)}
    assert sizes_by_shape(100)["rms_norm"] == before["rms_norm"]


def test_a_table_of_another_chip_is_refused(given: Path) -> None:
    with pytest.raises(ConfigError, match=r"sm_90.json is a table for sm_90, and the GPU is sm_100"):
        use_table(given, 100)


def test_ranks_whose_tables_differ_in_exact_sizes_know_it_and_fast_ones_do_not_count(given: Path) -> None:
    before = exact_fingerprint(90)
    assert before != exact_fingerprint(100), "attention takes other heads there"
    use_table(given, 90)
    assert exact_fingerprint(90) == before, "the same exact sizes, others for fast"
    given.write_text(given.read_text().replace('{"num_warps": 4}', '{"num_warps": 1}'))
    use_table(given, 90)
    assert exact_fingerprint(90) != before


def test_a_table_is_refused_where_no_kernel_is_launched(given: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch_table_file is .*sm_90.json, and a CPU launches no kernels"):
        set_arithmetic(torch.device("cpu"), threads=1, cpu_operators=None, launch_table_file=given)


def test_a_launch_is_exact_unless_whole_batches_are_asked_for() -> None:
    assert launch_sizes("expert_tiles", HERE, rows=1000)["ROWS"] == 16
    with whole_batches():
        assert launch_sizes("expert_tiles", HERE, rows=1000)["ROWS"] > 16
        assert launch_sizes("expert_tiles", HERE, rows=1000, exact=True)["ROWS"] == 16


def test_forced_sizes_hold_until_their_block_ends() -> None:
    before = launch_sizes("swiglu", HERE, rows=48)
    with forced("swiglu", ROWS=2):
        assert launch_sizes("swiglu", HERE, rows=48) == {**before, "ROWS": 2}
        with forced("swiglu", COLUMNS=128):
            assert launch_sizes("swiglu", HERE, rows=48) == {**before, "COLUMNS": 128}
        assert launch_sizes("swiglu", HERE, rows=48)["ROWS"] == 2
    assert launch_sizes("swiglu", HERE, rows=48) == before


def norm(lines: Any) -> dict[str, Any]:
    return table({"rms_norm": {"any": lines}})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("{", "is not JSON"),
        ([], "must be an object with exactly architecture, kernels, measured_on"),
        ({"architecture": 90}, "must be an object with exactly architecture, kernels, measured_on"),
        (table(architecture="sm_90"), "architecture is 'sm_90'; it is a whole number"),
        (table(architecture=True), "architecture is True"),
        (table(measured_on=3), "measured_on is 3; it names chip and versions, or is null"),
        (table([]), "kernels must be an object"),
        (table({"softmax": {}}), "softmax is no kernel whose sizes are tuned; those are attention_rows, "),
        (table({"rms_norm": []}), 'rms_norm must be an object of shapes, "any" among them'),
        (table({"rms_norm": {"5120": {"exact": EXACT, "0": FEW}}}), 'rms_norm must be an object of shapes, "any"'),
        (norm([]), 'rms_norm, shape any: must be an object of numbers of rows, "0" among them'),
        (norm({"exact": EXACT, "1": FEW}), 'rms_norm, shape any: must be an object of numbers of rows, "0" among them'),
        (norm({"0": FEW}), 'rms_norm, shape any: sizes change bits: it needs a line "exact"'),
        (
            table({"swiglu": {"any": {"0": {}, "exact": {}}}}),
            'swiglu, shape any: sizes change no bits: it must not have a line "exact"',
        ),
        (norm({"exact": EXACT, "0": FEW, "-1": FEW}), "rms_norm, shape any: '-1' is no number of rows"),
        (norm({"exact": EXACT, "0": FEW, "07": FEW}), "rms_norm, shape any: '07' is no number of rows"),
        (norm({"exact": EXACT, "0": {}}), "rms_norm, shape any, rows 0: must be an object with exactly num_warps"),
        (
            norm({"exact": EXACT, "0": FEW | {"BLOCK": 2}}),
            "rms_norm, shape any, rows 0: must be an object with exactly",
        ),
        (
            norm({"exact": {"num_warps": 3}, "0": FEW}),
            "rms_norm, shape any, rows exact: num_warps is 3; it may be 1, 2",
        ),
        (norm({"exact": EXACT, "0": {"num_warps": 4.0}}), "rms_norm, shape any, rows 0: num_warps is 4.0; it may be"),
        (norm({"exact": EXACT, "0": {"num_warps": True}}), "rms_norm, shape any, rows 0: num_warps is True"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_file_kernel_and_field(wrong: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "sm_90.json"
    file.write_text(wrong if isinstance(wrong, str) else json.dumps(wrong))
    with pytest.raises(ConfigError) as refused:
        read_table(file)
    assert str(refused.value).startswith(f"{file}: {said}")


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_table"):
        read_table(tmp_path / "no_table.json")


# ------------------------------------------------------------------------------------------- in the repository


def test_every_table_is_named_by_its_architecture_and_written_as_the_tuner_writes_it() -> None:
    files = sorted(FOLDER.iterdir())
    assert {file.name for file in files} == {f"sm_{number}.json" for number in repository_tables()}
    for file in files:
        assert write_table(read_table(file)) == file.read_text(encoding="utf-8")


def test_the_first_table_names_every_kernel() -> None:
    assert set(repository_tables()[90].kernels) == set(TUNABLES)


def test_every_kernel_that_may_be_tuned_is_launched_with_its_sizes() -> None:
    """And launches ask for no other."""
    asked: set[str] = set()
    for path in (ROOT / "kernels").glob("*/*_kernel.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "launch_sizes":
                asked |= {
                    part.value
                    for part in ast.walk(node.args[0])
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
    assert asked == set(TUNABLES)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_are_compiled_ahead_with_the_sizes_of_each_chip(architecture: int) -> None:
    pytest.importorskip("triton")
    from whalepod.kernels.compiled_kernels import kernels

    for name, operation, kernel in (
        ("swiglu", "experts", "swiglu_kernel"),
        ("index_queries", "index_queries", "index_queries_kernel"),
        ("sparse_attention", "sparse_attention", "sparse_attention_kernel"),
        ("experts_down", "experts", "down_kernel"),
        ("top_entries", "top_entries", "choose_kernel"),
    ):
        compiled = [
            {**one.constants, **one.options}
            for one in kernels()
            if (one.operation, one.name) == (operation, kernel) and architecture in one.architectures
        ]
        for sizes in sizes_by_shape(architecture)[name]["any"].sizes:
            wanted = {size: value for size, value in sizes.items() if value}
            assert any(wanted.items() <= one.items() for one in compiled), (name, sizes)


def test_an_attention_program_of_sm_100_takes_half_as_many_heads() -> None:
    """Sums of 64 fill all of its tensor memory: no launch succeeds."""
    every = [sizes_by_shape(number)["sparse_attention"]["any"] for number in (90, 100)]
    assert [{sizes["HEAD_BLOCK"] for sizes in (*lines.sizes, lines.exact or {})} for lines in every] == [{64}, {32}]
