"""Matrices step along orthogonal directions, everything else as Adam does, and a run can go on where it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whalepod.training.optimiser import UPDATE_SIZE, Optimiser, Rates, orthogonal, rate_scale
from whalepod.training.states import narrowed

RATES = Rates(muon=0.01, adam=0.02, weight_decay=0.0)
SHAPES = {
    "layers.0.attn.wq_a.weight": (6, 9),
    "layers.0.ffn.w1": (3, 6, 9),
    "embed.weight": (7, 4),
    "norm.weight": (4,),
}


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def stepped(optimiser: Optimiser, seed: int) -> None:
    for name, grad in drawn(seed).items():
        optimiser.parameters[name].grad = grad
    optimiser.step(1.0)


def leaves() -> dict[str, Tensor]:
    return {name: tensor.requires_grad_(True) for name, tensor in drawn(0).items()}


@pytest.mark.parametrize("shape", [(4, 8, 5), (1, 5, 8), (2, 6, 6)])
def test_orthogonal_matrices_have_singular_values_about_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonal(matrices, steps=8))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_updates_of_matrices_have_the_size_of_adams() -> None:
    optimiser = Optimiser(leaves(), RATES)
    stepped(optimiser, 1)
    for name in ("layers.0.attn.wq_a.weight", "layers.0.ffn.w1"):
        moved = (optimiser.parameters[name].detach() - drawn(0)[name]) / RATES.muon
        assert UPDATE_SIZE * 0.6 < float(moved.square().mean().sqrt()) < UPDATE_SIZE * 1.3
    moved = (optimiser.parameters["norm.weight"].detach() - drawn(0)["norm.weight"]) / RATES.adam
    assert torch.allclose(moved, -drawn(1)["norm.weight"].sign(), atol=1e-3)


def test_a_run_goes_on_from_its_state() -> None:
    straight, first = Optimiser(leaves(), RATES), Optimiser(leaves(), RATES)
    for seed in (1, 2):
        stepped(straight, seed)
        stepped(first, seed)
    later = Optimiser(
        {name: tensor.detach().clone().requires_grad_(True) for name, tensor in first.parameters.items()}, RATES
    )
    later.load({name: tensor.clone() for name, tensor in first.state().items()})
    stepped(straight, 3)
    stepped(later, 3)
    assert all(torch.equal(straight.parameters[name], later.parameters[name]) for name in SHAPES)
    assert {tensor.dtype for tensor in narrowed(first.state()).values()} == {torch.bfloat16, torch.float32}


def test_rates_rise_stay_and_fall_to_nothing() -> None:
    scales = [rate_scale(share, warm_up=0.1, decay=0.5) for share in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0)]
    assert scales == pytest.approx([0.001, 0.501, 1.0, 1.0, 0.5, 0.0])
