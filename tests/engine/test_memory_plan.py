"""What a rank's memory is planned for, and which plans are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engine_world import OPTIONS, tiny_model
from whalepod.core.errors import ConfigError
from whalepod.engine.engine import Engine
from whalepod.engine.memory_plan import plan_memory
from whalepod.engine.options import RankOptions
from whalepod.model.tensor_layout import ModelRole


def test_the_plan_counts_what_is_really_allocated() -> None:
    model = tiny_model()
    plan = plan_memory(model, replace(OPTIONS, blocks=10, slots=3))
    caches = model.allocate(blocks=10, slots=3)
    rings = (caches.windows, caches.draft_windows, caches.groups)
    assert plan.blocks * plan.block_bytes == sum(
        pool.nbytes for pools in (caches.global_kv, caches.index_keys) for pool in pools.values()
    )
    assert plan.slots * plan.slot_bytes == sum(ring.nbytes for kind in rings for ring in kind.values())


def test_without_limits_every_slot_gets_a_whole_context() -> None:
    plan = plan_memory(tiny_model(), RankOptions(slots=2))
    assert (plan.blocks, plan.context_tokens_max) == (2 * 64, 1024)


def test_a_memory_limit_decides_the_blocks_and_the_longest_context() -> None:
    roomy = plan_memory(tiny_model(), RankOptions(slots=2))
    limit = roomy.total_bytes - roomy.blocks * roomy.block_bytes + 20 * roomy.block_bytes
    plan = plan_memory(tiny_model(), RankOptions(slots=2, memory_bytes=limit))
    assert (plan.blocks, plan.context_tokens_max) == (20, 320)
    assert plan.total_bytes <= limit


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"memory_bytes 1000 is too little: weights \d"):
        plan_memory(tiny_model(), RankOptions(memory_bytes=1000))
    with pytest.raises(ConfigError, match="context_tokens_max 1000 does not fit"):
        plan_memory(tiny_model(), RankOptions(blocks=10, context_tokens_max=1000))


def test_an_encoder_needs_less() -> None:
    full, encoder = (plan_memory(tiny_model(role), OPTIONS) for role in ModelRole)
    assert encoder.weights_bytes < full.weights_bytes
    assert encoder.slot_bytes < full.slot_bytes
    assert encoder.block_bytes == full.block_bytes


def test_a_chunk_shorter_than_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk_tokens must be at least 2 for this model"):
        Engine(tiny_model(), replace(OPTIONS, chunk_tokens=1), store=None, deliver=lambda _: None)


def test_options_that_cannot_work_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="slots must be at least 1"):
        RankOptions(slots=0)
    with pytest.raises(ConfigError, match="blocks must be at least 1"):
        RankOptions(blocks=0)
