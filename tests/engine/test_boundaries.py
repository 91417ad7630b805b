"""Boundaries, against the definitions of the design and the released model's figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.engine_world import tiny_model
from whalepod.core.errors import ConfigError
from whalepod.engine.boundaries import Boundaries
from whalepod.model.config import ModelConfig

RELEASED = Path(__file__).parents[2] / "model/released_config.json"


@pytest.fixture(scope="module")
def released() -> Boundaries:
    config = ModelConfig.from_json(json.loads(RELEASED.read_text()))
    return Boundaries(config, config.block_tokens)


def tiny() -> Boundaries:
    return tiny_model().boundaries


def test_the_released_models_figures(released: Boundaries) -> None:
    assert (released.block_tokens, released.config.kept_rows, released.config.group_tokens) == (256, 140, 2)
    assert released.hit(stored_tokens=100_000, prompt_tokens=1000) == 768
    assert released.encoder_handoff(1001) == 860
    assert released.turn_borders(1000) == (512, 768)
    deep = 40 * 256
    assert released.replay_start(boundary=deep, prompt_tokens=deep + 140, exact=True) == deep - 2667
    assert released.replay_start(boundary=deep, prompt_tokens=deep + 140 + 127, exact=True) == deep - 20 * 127
    assert released.replay_start(boundary=deep, prompt_tokens=deep + 140, exact=False) == deep - 128


def test_a_block_size_that_splits_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_tokens must be a multiple of 2"):
        Boundaries(tiny().config, 15)


@given(prompt=st.integers(1, 400), stored=st.integers(0, 500))
def test_a_hit_is_the_last_border_that_is_stored_and_leaves_the_kept_rows(prompt: int, stored: int) -> None:
    boundary = tiny().hit(stored_tokens=stored, prompt_tokens=prompt)
    candidates = [n for n in range(0, 500, 16) if n <= stored and n <= prompt - 28]
    assert boundary == max(candidates, default=0)


@given(prompt=st.integers(1, 400))
def test_an_encoder_hands_over_at_the_last_whole_group_below_the_kept_rows(prompt: int) -> None:
    candidates = [n for n in range(0, 400, 2) if n <= prompt - 28]
    assert tiny().encoder_handoff(prompt) == max(candidates, default=0)


@given(prompt=st.integers(1, 400))
def test_a_next_turn_that_is_a_little_longer_resumes_at_a_turn_border(prompt: int) -> None:
    borders = tiny().turn_borders(prompt)
    assert all(border % 16 == 0 and 0 < border <= prompt for border in borders)
    for more in range(1, 17):
        boundary = tiny().hit(stored_tokens=prompt, prompt_tokens=prompt + more)
        assert boundary == 0 or boundary in borders


@given(boundary=st.integers(1, 60), more=st.integers(28, 90), exact=st.booleans())
def test_replay_starts_no_later_for_exactness_and_never_before_the_prompt(
    boundary: int, more: int, exact: bool
) -> None:
    boundary *= 16
    start = tiny().replay_start(boundary=boundary, prompt_tokens=boundary + more, exact=exact)
    assert 0 <= start < boundary
    assert tiny().replay_start(boundary=boundary, prompt_tokens=boundary + more, exact=True) <= max(0, boundary - 16)


def test_windows_are_exact_for_everyone_only_where_the_last_source_is() -> None:
    assert tiny().windows_exact_from(0) == 0
    assert tiny().windows_exact_from(100) == 100 + 6 * 15
