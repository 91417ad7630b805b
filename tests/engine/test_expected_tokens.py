"""Which tokens the network is told to expect, so that it can have their n-gram rows in memory in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, prompt_of, tiny_model
from whalepod.model.network import Network

ONE = replace(GREEDY, max_tokens=1)


def test_tokens_of_a_prompt_are_expected_one_step_before_their_rows_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their n-gram rows can be brought into memory meanwhile. History: what their n-grams reach back to."""
    said: list[tuple[Sequence[int], Sequence[int]]] = []
    monkeypatch.setattr(Network, "expect", lambda _, token_ids, history: said.append((token_ids, history)))
    prompt, world = list(prompt_of(100)), World(options=replace(OPTIONS, chunk_tokens=48))
    reach = tiny_model().config.engram_max_ngram_size - 1
    world.submit(world.request(prompt, ONE))
    assert [list(ids) for ids, _ in said] == [prompt[:48]], "before there is a step"
    world.run()
    expected = [list(token_ids) for token_ids, _ in said[1:]]
    starts = [next(n for n in range(100) if prompt[n : n + len(ids)] == ids) for ids in expected]
    assert starts[0] > 0 and starts == sorted(starts)
    assert all(
        start + len(ids) >= later for start, ids, later in zip(starts, expected, [*starts[1:], 100], strict=True)
    )
    assert [list(history) for _, history in said[1:]] == [prompt[start - reach : start] for start in starts]
