"""Noise: the published generator, no state, and nothing that statistics can see."""

from __future__ import annotations

import numpy as np
import pytest

from whalepod.engine.noise import (
    ROUGH_ERROR,
    gumbel_of,
    gumbels,
    noise_words,
    philox4x32,
    rough_gumbel_of,
    uniform_of,
    uniforms,
)

LANES = 4096


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_test_vectors(
    counter: tuple[int, int, int, int], key: int, words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32(np.array([key], np.uint64), (c0, c1, c2, c3))) == words


def test_a_lanes_number_does_not_depend_on_how_many_lanes_are_asked_for() -> None:
    many = uniforms(5, position=9, lanes=LANES)
    for count in (0, 1, 3, 4, 5, 1001):
        assert np.array_equal(uniforms(5, position=9, lanes=count), many[:count])


def test_rows_have_the_noise_of_their_own_key_and_position() -> None:
    keys, positions = np.array([7, 2**64 - 1, 7], np.uint64), np.array([4, 0, 5], np.uint64)
    rows = noise_words(keys, positions=positions, lanes=101, purpose=2, sub=3)
    for row, key, position in zip(rows, keys, positions, strict=True):
        alone = uniforms(int(key), position=int(position), lanes=101, purpose=2, sub=3)
        assert np.array_equal(uniform_of(row), alone)


def test_rough_noise_is_as_near_as_it_says() -> None:
    ends = np.arange(2000, dtype=np.uint32)
    words = np.concatenate([ends, ~ends, np.arange(0, 2**32, 9973, dtype=np.int64).astype(np.uint32)])
    assert float(abs(rough_gumbel_of(words) - gumbel_of(words)).max()) < ROUGH_ERROR


def test_numbers_are_never_zero_or_one() -> None:
    words = np.array([0, 2**32 - 1], np.uint32)
    assert uniform_of(words)[0] > 0
    assert uniform_of(words)[1] < 1
    assert np.isfinite(gumbel_of(words)).all()
    u = np.concatenate([uniforms(1, position=position, lanes=LANES) for position in range(64)])
    assert u.min() > 0
    assert u.max() < 1


@pytest.mark.parametrize("key", [0, 1, 2**63, 0xDEADBEEF])
def test_numbers_are_uniform(key: int) -> None:
    u = np.concatenate([uniforms(key, position=position, lanes=LANES) for position in range(50)])
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    expected = len(u) / 64
    # χ² with 63 degrees of freedom: 112 is the 1 - 1e-4 quantile.
    assert float(((counts - expected) ** 2 / expected).sum()) < 112


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(abs(np.corrcoef(a, b)[0, 1]))


def test_neighbouring_positions_keys_columns_and_purposes_share_nothing() -> None:
    base = uniforms(77, position=1000, lanes=LANES)
    others = [
        uniforms(77, position=1001, lanes=LANES),
        uniforms(78, position=1000, lanes=LANES),
        uniforms(77 + 2**32, position=1000, lanes=LANES),
        uniforms(77, position=1000, lanes=LANES, sub=1),
        uniforms(77, position=1000, lanes=LANES, purpose=2),
    ]
    for other in others:
        assert _correlation(base, other) < 4 / LANES**0.5
    assert _correlation(base[:-1], base[1:]) < 4 / LANES**0.5
    assert _correlation(base[:-4], base[4:]) < 4 / LANES**0.5


def test_one_lanes_numbers_over_positions_are_independent() -> None:
    column = np.array([uniforms(3, position=position, lanes=8)[5] for position in range(4096)])
    assert _correlation(column[:-1], column[1:]) < 4 / 4095**0.5
    assert abs(float(column.mean()) - 0.5) < 4 * (1 / 12 / 4096) ** 0.5


def test_the_largest_weight_plus_noise_is_drawn_in_proportion() -> None:
    weights = np.array([0.5, 0.2, 0.15, 0.1, 0.05])
    draws = 4_000
    picks = [int(np.argmax(np.log(weights) + gumbels(11, position=position, lanes=5))) for position in range(draws)]
    counts = np.bincount(picks, minlength=5)
    expected = weights * draws
    # χ² with 4 degrees of freedom: 23.5 is the 1 - 1e-4 quantile.
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5
