"""Tokens drawn from tensors are those drawn from arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engine.sampled_rows import VOCAB, assert_drawn_as_on_the_host, random_groups
from whalepod.core.errors import InternalError, ServingError
from whalepod.engine import device_sampling
from whalepod.engine.device_sampling import Group, draw_groups
from whalepod.engine.interface import SampledToken
from whalepod.engine.sampling import DrawRow, Sampler
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.acceptance import Hearing, judge


@pytest.mark.parametrize("rows_at_once", [4, 256])
def test_every_row_gets_the_token_that_it_gets_on_the_host(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    monkeypatch.setattr(device_sampling, "ROWS_AT_ONCE", rows_at_once)
    for seed in range(10):
        assert_drawn_as_on_the_host(random_groups(seed, requests=12))


def test_a_row_that_is_no_numbers_gets_an_error_and_its_neighbours_their_tokens() -> None:
    groups = random_groups(3, requests=6)
    wanted = draw_groups(groups)
    groups[2].logits[0, VOCAB - 1] = torch.nan
    groups[4].logits[0, 5] = torch.inf
    drawn = draw_groups(groups)
    assert [isinstance(tokens[0], InternalError) for tokens in drawn] == [False, False, True, False, True, False]
    assert [drawn[index] for index in (0, 1, 3, 5)] == [wanted[index] for index in (0, 1, 3, 5)]


def test_drafts_are_judged_as_on_the_host() -> None:
    end = ServingError("nothing may follow")
    free = np.ones(VOCAB, np.bool_)
    stood: set[int] = set()
    for seed in range(40):
        generator = np.random.default_rng(seed)
        sampler = Sampler(SamplingParams(temperature=0.3), key=seed, eos_id=1, prompt_ids=(3,))
        logits = generator.standard_normal((4, VOCAB), np.float32) * 3
        best = logits.argmax(axis=1)
        allowed = ((), (free, free, end), (end,))[seed % 3]
        here = Hearing(sampler, 9, logits, tuple(best[:3].tolist()), None, allowed)
        there = Hearing(sampler, 9, torch.from_numpy(logits), tuple(best[:3].tolist()), None, allowed)
        assert judge([there]) == judge([here])
        stood.add(len(judge([there])[0]))
    assert stood == {1, 2, 3, 4}


def test_nothing_is_drawn_of_no_rows() -> None:
    assert draw_groups([Group(torch.zeros(2, VOCAB), [])]) == [[]]
    only = Sampler(SamplingParams(temperature=0), key=0, eos_id=1, prompt_ids=())
    assert draw_groups([Group(torch.arange(6.0)[None], [DrawRow(only, 0)])]) == [[SampledToken(5)]]
