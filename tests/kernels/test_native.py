"""The compiled operators: there where a compiler is, taken where they should be, and like the references.

What the references promise (bits of a row in any batch, known values) the tests of each kernel check for both.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import seeded
from tests.native_build import MODULE, ROOT, build, compiler
from whalepod.kernels.attention import sink_attention
from whalepod.kernels.compressor import pool_groups
from whalepod.kernels.engram_gate import let_in
from whalepod.kernels.experts import dense_expert, expert_outputs, routed_experts
from whalepod.kernels.fallbacks import fallback_counts
from whalepod.kernels.indexer import candidate_mask, index_scores, select_top
from whalepod.kernels.linear import grouped_linear, linear
from whalepod.kernels.mhc import collapse, expand, predict_mixes
from whalepod.kernels.native import library
from whalepod.kernels.quantise import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat
from whalepod.kernels.rms_norm import rms_norm
from whalepod.kernels.rope import rotate
from whalepod.kernels.router import route

FOLDER = ROOT / "kernels" / "native"
FORMATS = {"fp8": FP8_BLOCK32, "fp4": FP4_BLOCK16, "mxfp4": MXFP4_BLOCK32}

built = pytest.mark.skipif(not library.available(), reason=f"no compiled operators: {library.REASON_MISSING}")


def _mixed(rows: int) -> Tensor:
    streams, fn = seeded(rows, 4, 27), seeded(24, 108, seed=1)
    mixes = predict_mixes(streams, fn, torch.ones(24), seeded(24, seed=2), rms_eps=1e-20, eps=1e-6, iterations=20)
    mixed = expand(collapse(streams, mixes.pre), streams, mixes)
    return torch.cat((mixes.pre, mixes.post, mixes.comb.flatten(1), mixed.flatten(1)), dim=1)


def _routed(rows: int, packed: PackedFormat | None = None) -> Tensor:
    x, logits = seeded(rows, 32), seeded(6, 32, seed=1)
    ids, weights = route(x, logits, seeded(6, seed=2), chosen=3, factor=1.5)
    gate_up, down = seeded(6, 64, 32, seed=3), seeded(6, 32, 32, seed=4)
    routed = routed_experts(x, ids, weights, gate_up, down, limit=1.5, input_format=packed)
    pairs = expert_outputs(x, torch.arange(rows), ids[:, 0], gate_up, down, limit=1.5, input_format=packed)
    shared = dense_expert(x, gate_up[0], down[0], limit=1.5, input_format=packed)
    return torch.cat((ids, weights, routed, pairs, shared), dim=1)


KERNELS: dict[str, Callable[[int], Tensor]] = {
    "linear": lambda rows: linear(seeded(rows, 37), seeded(13, 37, seed=1)),
    "linear of other strides": lambda rows: linear(seeded(24, rows).t(), seeded(6, 24, seed=1).flip(0)),
    "grouped linear": lambda rows: grouped_linear(seeded(rows, 3, 20), seeded(3, 9, 20, seed=1)),
    "norm": lambda rows: rms_norm(seeded(rows, 2, 19), seeded(19, seed=1), eps=1e-6),
    "rotation": lambda rows: rotate(seeded(rows, 3, 10), seeded(rows, 10, seed=1), seeded(rows, 10, seed=2)),
    "pooling": lambda rows: pool_groups(seeded(rows, 2, 11), seeded(rows, 2, 11, seed=1) * 20),
    "mixing": _mixed,
    "gate": lambda rows: let_in(
        seeded(rows, 4, 21), seeded(rows, 5 * 21, seed=1), seeded(4, 21, seed=2), seeded(rows, seed=3) > 0, eps=1e-20
    ).flatten(1),
    "attention": lambda rows: sink_attention(
        seeded(rows, 3, 76), seeded(rows, 13, 76, seed=1), seeded(rows, 13, seed=2) > 0, seeded(3, seed=3), scale=0.3
    ),
    "experts": _routed,
    "experts of rounded rows": lambda rows: _routed(rows, FP8_BLOCK32),
    "index scores": lambda rows: index_scores(seeded(rows, 5, 12), seeded(rows, 5, seed=1), seeded(19, 12, seed=2)),
}


@built
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 50])
def test_operators_give_what_the_references_give(name: str, rows: int) -> None:
    with torch.inference_mode():
        with library.chosen(wanted=False):
            wanted = KERNELS[name](rows)
        with library.chosen(wanted=True):
            torch.testing.assert_close(KERNELS[name](rows), wanted, atol=2e-5, rtol=2e-5)


@built
@pytest.mark.parametrize("name", FORMATS)
def test_records_are_the_references_bit_for_bit(name: str) -> None:
    packed = FORMATS[name]
    awkward = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-38, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 2.0**-9, 1.5 * 2**-9, 448, -464, 1e38]
    )
    steps = torch.arange(-960, 960) / 160
    x = torch.cat((awkward, seeded(4096 - len(awkward) - len(steps)) * 300, steps))
    rows = torch.stack([(x * 2.0**power).roll(power) for power in range(-140, 120, 7)]).clamp(-3e38, 3e38)
    with torch.inference_mode():
        with library.chosen(wanted=False):
            records, values = packed.encode(rows), packed.round_trip(rows)
        with library.chosen(wanted=True):
            assert torch.equal(packed.encode(rows), records)
            assert torch.equal(packed.decode(records, rows.shape[1], torch.float32), values)
            assert torch.equal(packed.round_trip(rows), values)


@built
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_number_stays_none(name: str) -> None:
    x = seeded(2, 64)
    x[0, 3] = math.nan
    with torch.inference_mode(), library.chosen(wanted=True):
        decoded = FORMATS[name].decode(FORMATS[name].encode(x), 64, torch.float32)
        assert bool(decoded[0, 3].isnan()) and not bool(decoded[1].isnan().any())
        assert bool(linear(x, seeded(4, 64, seed=1))[0].isnan().all())


@built
def test_selections_are_the_references() -> None:
    scores = (seeded(40, 333) * 4).round()  # many are equal
    allowed, visible = seeded(40, 333, seed=1) > 0.5, torch.arange(40) * 9
    with torch.inference_mode():
        for count in (1, 16, 64, 400):
            with library.chosen(wanted=False):
                wanted = (
                    select_top(scores, allowed, count=count),
                    candidate_mask(scores, visible, block=8, top_blocks=count),
                )
            with library.chosen(wanted=True):
                assert torch.equal(select_top(scores, allowed, count=count), wanted[0])
                assert torch.equal(candidate_mask(scores, visible, block=8, top_blocks=count), wanted[1])


def test_operators_are_there_where_a_compiler_is() -> None:
    assert library.available() or compiler() is None, (
        f"{library.REASON_MISSING}: `make venv` or `python -m tests.native_build`"
    )


@built
def test_gradients_other_widths_and_other_devices_take_the_reference() -> None:
    x, weight = seeded(2, 4), seeded(3, 4, seed=1).requires_grad_()
    assert library.takes(x)
    assert not library.takes(x, x.double())
    assert not library.takes(x.bfloat16())
    assert not library.takes(x.to("meta"))
    assert linear(x, weight).requires_grad
    with torch.no_grad():
        assert library.takes(x, weight)
    with library.chosen(wanted=False):
        assert not library.takes(x)


@built
def test_an_expert_that_is_not_there_is_an_error_and_no_crash() -> None:
    x, ids = seeded(1, 8), torch.tensor([[7]])
    with torch.inference_mode(), library.chosen(wanted=True), pytest.raises(MemoryError, match="names nothing"):
        routed_experts(x, ids, torch.ones(1, 1), seeded(2, 8, 8), seeded(2, 8, 4), limit=1.0)


def test_operators_that_are_missing_are_counted_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "REASON_MISSING", "planted")
    with library.chosen(wanted=True):
        library.decide(wanted=False)
        assert ("cpu_operators", "planted") not in fallback_counts()
        library.decide(wanted=True)
    assert fallback_counts()["cpu_operators", "planted"] == 1


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER, tmp_path / "native", ignore=shutil.ignore_patterns("*.so"))
    source = tmp_path / "native" / "operators.c"
    source.write_text(re.sub(r"#define NUMERICS \d+", "#define NUMERICS 999", source.read_text(encoding="utf-8")))
    library_path = build(tmp_path / "native", "-O0")
    monkeypatch.setattr(library, "PATH", library_path)
    assert "built from other sources" in str(library.load()[1])
    older = source.stat().st_mtime - 10
    os.utime(library_path, (older, older))
    assert "older than its sources" in str(library.load()[1])
    library_path.unlink()
    assert library.load() == ({}, "no C compiler built them here")


def test_both_halves_name_the_same_numerics_and_all_sources_are_declared() -> None:
    source = (FOLDER / "operators.c").read_text(encoding="utf-8")
    assert f"#define NUMERICS {library.NUMERICS}\n" in source
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    module = next(module for module in tool["setuptools"]["ext-modules"] if module["name"] == MODULE)
    there = {f"kernels/native/{path.name}" for path in FOLDER.iterdir() if path.suffix in (".c", ".h")}
    assert {*module["sources"], *module["depends"]} == there


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_processors_without_vectors_get_the_same_bits(tmp_path: Path) -> None:
    """The same sources with every lane spelled out, as other processors than x86 compile them."""
    plain = ctypes.CDLL(str(build(FOLDER, "-DWHALEPOD_PLAIN", "-O1", output=tmp_path / "plain.so")))
    fast = ctypes.CDLL(str(library.PATH))
    x, weight, row_weights = seeded(11, 76), seeded(13, 76, seed=1), seeded(76, seed=2)
    values, ones = seeded(11, 24, seed=3), torch.ones(24)
    keys, valid, sink = seeded(11, 21, 76, seed=4), seeded(11, 21, seed=5) > 0, seeded(1, seed=6)
    results: list[list[Tensor]] = []
    for operators in (plain, fast):
        product, normed, looked = torch.zeros(11, 13), torch.zeros(11, 76), torch.zeros(11, 76)
        pre, post, comb = torch.zeros(11, 4), torch.zeros(11, 4), torch.zeros(11, 16)
        calls = {
            "linear": (x, weight, product, 11, 1, 76, 13),
            "rms_norm": (x, row_weights, normed, 11, 76, 1e-6),
            "split_mixes": (values, ones, ones, pre, post, comb, 11, 4, 1e-6, 20),
            "attention": (x, keys, valid, sink, looked, 11, 1, 21, 76, 0.2),
        }
        for name, arguments in calls.items():
            call = getattr(operators, f"whalepod_{name}")
            call.argtypes = library.argument_types(name)
            call(*[argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments])
        results.append([product, normed, looked, pre, post, comb])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) and bool(one.any())
