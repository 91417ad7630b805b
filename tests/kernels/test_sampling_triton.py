"""The Triton kernels against the sampler of the host, in Triton's interpreter on the CPU: tokens are equal."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from tests.engine.sampled_rows import VOCAB, assert_drawn_as_on_the_host, random_groups
from whalepod.engine import device_sampling
from whalepod.engine.noise import gumbels
from whalepod.kernels.sampling import Noise, reference, triton_kernel


@pytest.fixture
def triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's way, with kernels of small tiles in the interpreter."""
    monkeypatch.setattr(triton_kernel, "TILE", 128)
    monkeypatch.setattr(triton_kernel, "PARTS", 2)
    for name in ("apply_edits", "apply_masks", "draw", "log_sums"):
        monkeypatch.setattr(device_sampling, name, getattr(triton_kernel, name))
    monkeypatch.setattr(device_sampling, "draw_kept", lambda *given: triton_kernel.draw_kept(*given, candidates=64))


@pytest.mark.usefixtures("triton_kernels")
def test_every_row_gets_the_token_that_it_gets_on_the_host() -> None:
    assert_drawn_as_on_the_host(random_groups(0, requests=6))


@pytest.mark.usefixtures("triton_kernels")
def test_rough_and_exact_noise_find_the_same_tokens_and_say_where_they_cannot() -> None:
    rows = 4
    noise = Noise(torch.arange(rows) * 7919 - 3, torch.arange(rows) + 5)
    temperatures = torch.tensor([1.0, 0.5, 0.0, 1.0])
    weights = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))
    wanted, _ = reference.draw(weights, temperatures, noise)
    ids, unsure = triton_kernel.draw(weights, temperatures, noise)
    assert torch.equal(ids, wanted) and not unsure.any()
    weights[0, 7], weights[1, 3], weights[3] = torch.nan, torch.inf, -torch.inf
    _, unsure = triton_kernel.draw(weights, temperatures, noise)
    assert unsure.tolist() == [True, True, False, True]


def test_the_plain_noise_is_that_of_the_host() -> None:
    keys = [0, 2**64 - 1, 0x0123456789ABCDEF]
    noise = Noise(torch.from_numpy(np.array(keys, np.uint64).view(np.int64)), torch.tensor([0, 2**32 - 1, 77]))
    rows = reference.gumbels(noise, 37).numpy()
    for key, position, row in zip(keys, [0, 2**32 - 1, 77], rows, strict=True):
        np.testing.assert_allclose(row, gumbels(key, position=position, lanes=37), rtol=1e-14)
