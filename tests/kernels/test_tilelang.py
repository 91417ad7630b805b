"""TileLang programs against the plain versions and the default kernels, whose second opinion they are: on the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_sparse_attention_gluon import HOPPER, problem
from whalepod.kernels.activation import swiglu
from whalepod.kernels.sparse_attention import reference

pytestmark = pytest.mark.skipif(not HOPPER, reason="needs an H100 or H200")

PER_ROW = ("queries", "bases", "positions", "lowest", "cos", "sin", "chosen")


def difference(ours: Tensor, wanted: Tensor) -> float:
    return float((ours.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("selected", [True, False])
def test_attention_over_every_length_of_window_and_selection_agrees_with_both(selected: bool) -> None:
    from whalepod.kernels.sparse_attention import gluon_kernel, tilelang_kernel

    counts, positions = [0, 1, 63, 64, 65, 511, 512, 0], [0, 62, 63, 64, 127, 128, 70_000, 500]
    given: dict[str, Any] = problem(counts * 40, positions * 40)
    if not selected:
        given["entries"] = given["chosen"] = None
    ours = tilelang_kernel.sparse_attention(**given)
    # Weights and the result are rounded to bfloat16, and the turned channels once more.
    wide: dict[str, Any] = given | {"queries": given["queries"].float()}
    assert difference(ours, reference.sparse_attention(**wide)) <= 4e-3
    assert difference(ours, gluon_kernel.sparse_attention(**given)) <= 3e-3
    assert torch.equal(ours, tilelang_kernel.sparse_attention(**given))
    none: dict[str, Any] = {
        name: value[:0] if name in PER_ROW and value is not None else value for name, value in given.items()
    }
    assert tilelang_kernel.sparse_attention(**none).shape == (0, *ours.shape[1:])


def test_attention_without_keys_and_with_no_sink_is_zero() -> None:
    from whalepod.kernels.sparse_attention import tilelang_kernel

    given = problem([0, 0], [5, 900])
    given["lowest"] = given["positions"] + 1
    given["sink"] = torch.full_like(given["sink"], -torch.inf)
    assert not tilelang_kernel.sparse_attention(**given).any()


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 300])
def test_hidden_values_of_experts_agree_with_both_whatever_the_load(rows: int) -> None:
    from whalepod.kernels.experts import tilelang_kernel, triton_kernel

    generator = torch.Generator("cuda").manual_seed(rows)
    experts, columns, width, choices, limit = 7, 2304, 5120, 3, 2.0
    x = torch.randn(rows, width, device="cuda", generator=generator).bfloat16()
    gate_up = torch.randn(experts, 2 * columns, width, device="cuda", generator=generator).bfloat16() * width**-0.5
    ids = torch.rand(rows, experts, device="cuda", generator=generator).argsort(dim=1)[:, :choices]
    ids[: rows // 2] = ids[0]  # Some experts have many more rows than the others, and some may have none.
    dealt = triton_kernel.deal_tiles(ids.flatten(), experts, tilelang_kernel.ROWS)
    ours = tilelang_kernel.hidden_values(x, choices, dealt, gate_up, limit=limit)
    pairs = dealt[0].long()
    gates = torch.empty(len(pairs), 2 * columns, device="cuda")
    for expert in range(experts):
        mine = ids.flatten()[pairs] == expert
        gates[mine] = x[pairs[mine] // choices].float() @ gate_up[expert].float().t()
    # Gates, values and their product are rounded to bfloat16, one after the other.
    assert difference(ours, swiglu(gates[:, :columns], gates[:, columns:], limit=limit)) <= 8e-3
    theirs = triton_kernel.hidden_values(x, choices, dealt, tilelang_kernel.ROWS, gate_up, limit=limit, rounds=False)
    assert difference(ours, theirs) <= 4e-3
