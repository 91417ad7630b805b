from __future__ import annotations

from pathlib import Path

import pytest
import torch

from whalepod.core.errors import ConfigError
from whalepod.engine.expert_parallel.seat import PooledExperts, Seat
from whalepod.engine.memory_plan import plan_memory
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.rank_shape import RankShape
from whalepod.model.checkpoint import load_tensors
from whalepod.model.tensor_layout import ModelRole
from whalepod.model.tiny_checkpoint import SMALLEST, write_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(directory, block_tokens=16, **SMALLEST)
    return directory


def test_a_rank_reads_everything_but_the_experts_of_others(checkpoint: Path) -> None:
    read = dict.fromkeys((None, 0, 1), 0)
    for index in read:
        seat = None if index is None else Seat(index, 2)
        config = RankModel.load(checkpoint).config
        experts = None if seat is None else PooledExperts.at(
            seat, checkpoint, config, role=ModelRole.FULL, dtype=torch.float32
        )  # fmt: skip
        told: list[tuple[int, int]] = []
        load_tensors(
            checkpoint,
            config,
            dtype=torch.float32,
            wanted=None if experts is None else experts.wanted,
            progress=lambda done, total, told=told: told.append((done, total)),
        )
        assert told[-1][0] == told[-1][1]
        read[index] = told[-1][0]
    config = RankModel.load(checkpoint).config
    layers = config.num_hidden_layers + config.num_nextn_predict_layers
    expert_bytes = 3 * config.hidden_size * config.moe_intermediate_size * 4
    assert read[0] == read[1] == read[None] - layers * 2 * expert_bytes


def test_the_plan_before_loading_is_the_plan_after_it_and_may_refuse(checkpoint: Path) -> None:
    options = RankOptions(slots=2, blocks=4)
    shapes: list[RankShape] = []
    model = RankModel.load(checkpoint, seat=Seat(1, 2), before_loading=shapes.append)
    assert plan_memory(shapes[0], options) == plan_memory(model, options)

    def refuse(shape: RankShape) -> None:
        plan_memory(shape, RankOptions(memory_bytes=1000))

    with pytest.raises(ConfigError, match="too little"):
        RankModel.load(checkpoint, before_loading=refuse)


def test_lost_experts_are_read_as_they_were_loaded(checkpoint: Path) -> None:
    first, second = (RankModel.load(checkpoint, seat=Seat(index, 2)).experts for index in range(2))
    assert first is not None
    assert second is not None
    layer = second.bank.layers[0]
    gate_up, down = first.read({layer.prefix: layer.slots})[layer.prefix]
    assert torch.equal(gate_up, layer.gate_up)
    assert torch.equal(down, layer.down)


def test_more_ranks_than_expert_slots_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="4 expert slots are too few for 5 ranks"):
        RankModel.load(checkpoint, seat=Seat(0, 5))
