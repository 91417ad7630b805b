"""The Triton kernel against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.engram_gate import reference as gate_reference
from whalepod.kernels.engram_gate import triton_kernel as gate_kernel
from whalepod.kernels.quantise import FP8_BLOCK32
from whalepod.kernels.quantise.triton_kernel import fp8_block32_round_trip
from whalepod.kernels.rms_norm import reference as norm_reference
from whalepod.kernels.rms_norm import triton_kernel as norm_kernel
from whalepod.kernels.router import reference as router_reference
from whalepod.kernels.router import triton_kernel as router_kernel

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_one_unit(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums of another order may round apart by one unit in the last place."""
    rtol = 2**-7 if wanted.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, wanted, rtol=rtol, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("width", [64, 96])
def test_norms_match_with_and_without_codes(dtype: torch.dtype, width: int) -> None:
    x, weight = draw(5, width).to(dtype), draw(width, seed=1).to(dtype)
    x[2] = 0
    wanted = norm_reference.rms_norm(x, weight, eps=1e-20)
    assert_one_unit(norm_kernel.rms_norm(x, weight, eps=1e-20), wanted)
    out, codes, scales = norm_kernel.rms_norm_fp8(x, weight, eps=1e-20)
    assert torch.equal(torch.cat((codes, scales), dim=-1), FP8_BLOCK32.encode(out))
    assert_one_unit(out, wanted)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 96), (1, 32), (4, 2048)])
def test_round_trips_are_equal(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (draw(*shape) * torch.exp(draw(*shape, seed=3) * 4)).to(dtype)
    assert torch.equal(fp8_block32_round_trip(x), FP8_BLOCK32.decode(FP8_BLOCK32.encode(x), shape[1], dtype))


@pytest.mark.parametrize("by_row", [False, True])
def test_choices_of_experts_match_and_ties_go_to_the_lower_id(by_row: bool) -> None:
    x, weight, bias = draw(6, 16).round(), draw(20, 16, seed=1).round(), draw(20, seed=2).round()
    bias = bias.repeat(6, 1) + torch.arange(6)[:, None] % 2 if by_row else bias
    ids, weights = router_kernel.choose(x @ weight.t(), bias, chosen=3, factor=1.5)
    wanted_ids, wanted = router_reference.route(x, weight, bias, chosen=3, factor=1.5)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_gated_memories_match(masked: bool) -> None:
    streams, projected, weight = draw(5, 4, 48), draw(5, 5 * 48, seed=1), draw(4, 48, seed=2)
    text = torch.tensor([True, False, True, True, False]) if masked else None
    ours = gate_kernel.let_in(streams, projected, weight, text, eps=1e-20)
    torch.testing.assert_close(ours, gate_reference.let_in(streams, projected, weight, text, eps=1e-20))
