"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.experts import reference, triton_kernel
from whalepod.kernels.quantise import FP8_BLOCK32


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("rows", "experts"), [(5, 12), (40, 3)])
def test_routed_experts_match_whatever_the_load(rows: int, experts: int, rounded: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    width, columns, choices = 64, 96, 2
    x = torch.randn(rows, width, generator=generator)
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :choices]
    ids[: rows // 2] = ids[0]  # One expert has many more rows than the others.
    weights = torch.rand(rows, choices, generator=generator)
    gate_up = torch.randn(experts, 2 * columns, width, generator=generator) / 8
    down = torch.randn(experts, width, columns, generator=generator) / 8
    arguments = (x, ids, weights, gate_up, down)
    input_format = FP8_BLOCK32 if rounded else None
    ours = triton_kernel.routed_experts(*arguments, limit=1.5, input_format=input_format)
    wanted = reference.routed_experts(*arguments, limit=1.5, input_format=input_format)
    # A rounded input may flip where sums have another order.
    assert (ours - wanted).norm() <= (2e-3 if rounded else 1e-6) * wanted.norm()


def test_tiles_hold_every_pair_once() -> None:
    ids = torch.tensor([5, 0, 5, 5, 2, 0, 5, 5])
    order, experts, starts, ends = triton_kernel.deal_tiles(ids, 6, 2)
    dealt = [
        (int(pair), int(expert))
        for expert, start, end in zip(experts, starts, ends, strict=True)
        if expert < 6
        for pair in order[start : min(int(end), int(start) + 2)]
    ]
    assert sorted(dealt) == list(enumerate(ids.tolist()))


def test_gates_and_values_match() -> None:
    gates = torch.randn(5, 192, generator=torch.Generator().manual_seed(1)) * 3
    ours = triton_kernel.swiglu(gates, limit=1.5, round_trip=False)
    wanted = reference.swiglu(gates[:, :96], gates[:, 96:], limit=1.5)
    torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("rounded", [False, True])
def test_outputs_of_pairs_combine_to_routed_experts_and_pairs_may_name_no_expert(rounded: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, experts, width, columns, choices = 6, 4, 64, 96, 2
    x = torch.randn(rows, width, generator=generator)
    ids = torch.rand(rows, experts, generator=generator).argsort(dim=1)[:, :choices]
    weights = torch.rand(rows, choices, generator=generator)
    gate_up = torch.randn(experts, 2 * columns, width, generator=generator) / 8
    down = torch.randn(experts, width, columns, generator=generator) / 8
    options: dict[str, Any] = {"limit": 1.5, "input_format": FP8_BLOCK32 if rounded else None}
    wanted = triton_kernel.routed_experts(x, ids, weights, gate_up, down, **options)
    pairs = torch.arange(rows).repeat_interleave(choices)
    absent = torch.full((5,), experts)
    outputs = triton_kernel.expert_outputs(
        x, torch.cat((pairs, pairs[:5])), torch.cat((ids.flatten(), absent)), gate_up, down, **options
    )
    ours = triton_kernel.combine_outputs(outputs[: len(pairs)].unflatten(0, ids.shape), weights)
    assert torch.equal(ours, wanted)
