from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.row_bits import rows_that_differ, seeded
from whalepod.kernels.mhc import Mixes, collapse, expand, predict_mixes, split_mixes, spread_scale

pytestmark = pytest.mark.usefixtures("arithmetic")

EPS = 1e-6


def sinkhorn_by_definition(logits: Tensor, iterations: int) -> Tensor:
    comb = torch.softmax(logits.double(), dim=-1) + EPS
    comb = comb / (comb.sum(dim=-2, keepdim=True) + EPS)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + EPS)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + EPS)
    return comb.float()


def mixes_of(values: Tensor, iterations: int = 20) -> Mixes:
    count = values.shape[1]
    return split_mixes(values, torch.ones(count), torch.zeros(count), eps=EPS, iterations=iterations)


@pytest.mark.parametrize("streams", [1, 2, 4, 5])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_comb_is_normalised_over_inputs_last(streams: int, iterations: int) -> None:
    values = seeded(3, (2 + streams) * streams)
    comb = mixes_of(values, iterations).comb
    wanted = sinkhorn_by_definition(values[:, 2 * streams :].unflatten(1, (streams, streams)), iterations)
    torch.testing.assert_close(comb, wanted)
    torch.testing.assert_close(comb.sum(dim=-2), torch.ones(3, streams), atol=1e-5, rtol=0)


def test_known_matrix_of_the_specification() -> None:
    """Appendix C: its rows are the input streams."""
    rows = [[1.0, 0, -1, 2], [0.5, 0.5, 0, 0], [-2, 1, 3, 0], [0, 0, 0, 0]]
    comb = mixes_of(torch.cat((torch.zeros(8), torch.tensor(rows).flatten()))[None]).comb[0]
    wanted = [
        [0.301499, 0.109891, 0.019090, 0.569518],
        [0.370918, 0.367490, 0.105254, 0.156336],
        [0.010476, 0.208442, 0.727296, 0.053785],
        [0.317106, 0.314175, 0.148358, 0.220360],
    ]
    torch.testing.assert_close(comb, torch.tensor(wanted), atol=1e-6, rtol=0)


def test_pre_has_eps_and_post_the_factor_two() -> None:
    mixes = mixes_of(torch.zeros(1, 24))
    torch.testing.assert_close(mixes.pre, torch.full((1, 4), 0.5 + EPS), atol=0, rtol=1e-7)
    torch.testing.assert_close(mixes.post, torch.ones(1, 4), atol=0, rtol=1e-7)


def test_prediction_scales_the_projection_by_the_root_mean_square_of_all_streams() -> None:
    streams, fn = seeded(3, 4, 16), seeded(24, 64, seed=1)
    scale, base = spread_scale(torch.tensor([0.5, 2.0, -1.0]), 4), seeded(24, seed=2)
    assert scale.tolist() == [0.5] * 4 + [2.0] * 4 + [-1.0] * 16
    flat = streams.flatten(1)
    values = (flat @ fn.t()) / flat.square().mean(dim=1, keepdim=True).sqrt()
    wanted = split_mixes(values, scale, base, eps=EPS, iterations=20)
    got = predict_mixes(streams, fn, scale, base, rms_eps=1e-20, eps=EPS, iterations=20)
    for part, value in got._asdict().items():
        torch.testing.assert_close(value, getattr(wanted, part), atol=1e-5, rtol=1e-5)


def test_expand_sums_over_the_first_index_of_comb() -> None:
    y, streams = seeded(2, 8), seeded(2, 4, 8, seed=1)
    mixes = Mixes(torch.zeros(2, 4), seeded(2, 4, seed=2), seeded(2, 4, 4, seed=3))
    wanted = mixes.post[:, :, None] * y[:, None] + torch.einsum("tji,tjd->tid", mixes.comb, streams)
    torch.testing.assert_close(expand(y, streams, mixes), wanted)
    torch.testing.assert_close(collapse(streams, mixes.post), torch.einsum("ti,tid->td", mixes.post, streams))


@pytest.mark.parametrize("streams", [2, 4, 5])
def test_a_row_has_the_same_bits_in_any_batch(streams: int) -> None:
    count = (2 + streams) * streams
    fn, scale, base = seeded(count, streams * 48, seed=1), torch.ones(count), seeded(count, seed=2)

    def mix(x: Tensor) -> Tensor:
        mixes = predict_mixes(x, fn, scale, base, rms_eps=1e-20, eps=EPS, iterations=20)
        mixed = expand(collapse(x, mixes.pre), x, mixes)
        return torch.cat((mixes.post, mixes.comb.flatten(1), mixed.flatten(1)), dim=1)

    assert rows_that_differ(mix, seeded(64, streams, 48)) == 0


def test_no_rows_give_no_mixes() -> None:
    assert mixes_of(torch.zeros(0, 24)).comb.shape == (0, 4, 4)
