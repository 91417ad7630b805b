"""Parts are taken out of copies, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from whalepod.core.errors import CheckpointError
from whalepod.engine.evaluation.ablations import (
    is_engram_table,
    is_markov_head,
    select_recent,
    zero_tensors,
    zeroed_checkpoint,
)
from whalepod.engine.rank_model import RankModel
from whalepod.model.batch import Segment
from whalepod.model.checkpoint import shard_paths
from whalepod.model.checkpoint_writer import WeightFormat
from whalepod.model.tiny_checkpoint import SMALLEST, write_tiny_checkpoint


@pytest.fixture(
    scope="module",
    params=[WeightFormat.FLOAT32, pytest.param(WeightFormat.RELEASE, marks=pytest.mark.slow)],
    ids=lambda form: form.value,
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(directory, form=request.param, force=True, block_tokens=16, **SMALLEST)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in shard_paths(directory) for name, tensor in load_file(shard).items()}


def values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


@pytest.mark.parametrize("wanted", [is_engram_table, is_markov_head])
def test_the_wanted_tensors_are_zero_and_all_others_are_what_they_were(
    checkpoint: Path, wanted: Callable[[str], bool]
) -> None:
    before = tensors(checkpoint)
    with zeroed_checkpoint(checkpoint, wanted) as copy:
        after = tensors(copy)
        RankModel.load(copy)
    changed = [name for name in before if not torch.equal(values(before[name]), values(after[name]))]
    assert changed == [name for name in before if wanted(name)] != []
    assert all(not values(after[name]).any() for name in changed)
    assert not copy.exists()


def test_a_part_that_is_not_there_cannot_be_taken_out(checkpoint: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="has no such part"),
        zeroed_checkpoint(checkpoint, lambda name: name == "x"),
    ):
        pass


def test_only_the_bytes_of_the_tensor_are_written(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3), "b": torch.full((5,), 2.0), "c": torch.ones(2)}, tmp_path / "x.safetensors")
    assert zero_tensors(tmp_path / "x.safetensors", lambda name: name == "b") == ["b"]
    found = load_file(tmp_path / "x.safetensors")
    assert [found[name].tolist() for name in "abc"] == [[1] * 3, [0] * 5, [1] * 2]


def test_indexers_that_are_told_to_choose_the_newest_entries(checkpoint: Path) -> None:
    model = RankModel.load(checkpoint)
    chosen: dict[str, torch.Tensor] = {}

    def note(name: str, value: torch.Tensor) -> None:
        if name.endswith(".index_rows"):
            chosen[name] = value[-1].clone()

    caches = model.allocate(blocks=8, slots=1)
    segment = Segment(slot=0, block_table=range(8), start=0, token_ids=range(20, 140), history=(), logits_start=119)
    model.network.forward([segment], caches, recorder=note)
    best = dict(chosen)
    assert select_recent(model) == list(model.config.index_source_layer_ids)
    model.network.forward([segment], model.allocate(blocks=8, slots=1), recorder=note)
    count = model.config.index_topk
    for layer in model.config.index_source_layer_ids:
        visible = 120 // model.config.ratio(model.config.kv_source(layer) or 0)
        assert chosen[f"layer{layer}.index_rows"].tolist() == list(range(visible - count, visible))
        assert best[f"layer{layer}.index_rows"].tolist() != list(range(visible - count, visible))
