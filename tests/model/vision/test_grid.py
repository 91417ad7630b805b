"""How many tokens images take: the table of the specification, and what holds for every size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.model.config import VisionConfig
from whalepod.model.conformity_vision import RELEASED
from whalepod.model.vision.grid import ImageGrid

SIDES = st.integers(1, 20_000)


@pytest.mark.parametrize(
    ("size", "patches", "grid", "tokens"),
    [
        ((224, 224), (39, 39), (13, 13), 184),
        ((640, 480), (35, 46), (12, 16), 206),
        ((1024, 1024), (74, 74), (25, 25), 652),
        ((1920, 1080), (69, 122), (23, 41), 968),
        ((4000, 3000), (81, 108), (27, 36), 1001),
        ((100, 5000), (358, 8), (120, 3), 482),
    ],
)
def test_the_table_of_the_specification(
    size: tuple[int, int], patches: tuple[int, int], grid: tuple[int, int], tokens: int
) -> None:
    fitted = ImageGrid.fit(*size, RELEASED)
    assert (fitted.patch_rows, fitted.patch_columns) == patches
    assert (fitted.rows, fitted.columns) == grid
    assert fitted.tokens == tokens


@given(SIDES, SIDES)
def test_no_image_takes_more_tokens_than_allowed(width: int, height: int) -> None:
    grid = ImageGrid.fit(width, height, RELEASED)
    assert 3 <= grid.tokens <= RELEASED.max_image_tokens
    assert (grid.width, grid.height) == (grid.patch_columns * 14, grid.patch_rows * 14)
    assert (grid.rows, grid.columns) == (-(-grid.patch_rows // 3), -(-grid.patch_columns // 3))


@given(SIDES, SIDES)
def test_an_image_of_a_fitted_size_stays_as_it_is(width: int, height: int) -> None:
    grid = ImageGrid.fit(width, height, RELEASED)
    if grid.width * grid.height >= RELEASED.min_pixels:
        assert ImageGrid.fit(grid.width, grid.height, RELEASED) == grid


def test_an_image_too_wide_is_measured_as_one_that_is_not() -> None:
    config = VisionConfig(2, 64, 4, 96, 14, 3, 1024, 7056, max_wh_ratio=4.0)
    assert ImageGrid.fit(1000, 100, config) == ImageGrid.fit(400, 100, config)
