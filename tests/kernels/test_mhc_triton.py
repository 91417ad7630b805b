"""The Triton kernels against the reference, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.mhc import Mixes, reference, triton_kernel
from whalepod.kernels.numerics import whole_batches


@pytest.mark.parametrize(("rows", "channels"), [(1, 32), (17, 100), (65, 32)])
def test_predicted_mixes_match(rows: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    streams = torch.randn(rows, 4, channels, generator=generator).bfloat16()
    fn = torch.randn(24, 4 * channels, generator=generator) * 0.1
    scale, base = torch.rand(24, generator=generator), torch.randn(24, generator=generator)
    expected = reference.predict_mixes(streams, fn, scale, base, rms_eps=1e-20, eps=1e-6, iterations=20)
    with whole_batches():
        mixes = triton_kernel.predict_mixes(
            streams, triton_kernel.split_weights(fn), scale, base, rms_eps=1e-20, eps=1e-6, iterations=20
        )
    for out, wanted in zip(mixes, expected, strict=True):
        torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


def test_a_row_of_zeros_has_finite_mixes() -> None:
    zeros = torch.zeros(2, 4, 32, dtype=torch.bfloat16)
    fn, ones = torch.ones(24, 128), torch.ones(24)
    for out, wanted in zip(
        triton_kernel.predict_mixes(
            zeros, triton_kernel.split_weights(fn), ones, ones, rms_eps=1e-20, eps=1e-6, iterations=20
        ),
        reference.predict_mixes(zeros, fn, ones, ones, rms_eps=1e-20, eps=1e-6, iterations=20),
        strict=True,
    ):
        torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_collapse_and_expand_match(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    streams = torch.randn(3, 4, 1030, generator=generator).to(dtype)
    y = torch.randn(3, 1030, generator=generator).to(dtype)
    pre, post = torch.rand(3, 4, generator=generator), torch.rand(3, 4, generator=generator)
    comb = torch.rand(3, 4, 4, generator=generator)
    rtol = 8e-3 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(
        triton_kernel.collapse(streams, pre), reference.collapse(streams, pre), rtol=rtol, atol=1e-6
    )
    expected = reference.expand(y, streams, Mixes(pre, post, comb))
    torch.testing.assert_close(triton_kernel.expand(y, streams, post, comb), expected, rtol=rtol, atol=1e-6)
