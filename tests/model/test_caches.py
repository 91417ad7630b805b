from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.model.network_world import PLAIN, golden_config
from whalepod.core.errors import ConfigError
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.tensor_layout import ModelRole

RELEASED = ModelConfig.from_json(json.loads((Path(__file__).parents[2] / "model/released_config.json").read_text()))


def allocate(config: ModelConfig, **changes: object) -> Caches:
    fields = {"blocks": 3, "slots": 2, "formats": RELEASE_FORMATS} | changes
    return Caches.allocate(config, **fields)  # type: ignore[arg-type]  # one dict of mixed types


def test_the_released_model_grows_by_890_bytes_a_token() -> None:
    caches = allocate(RELEASED, blocks=1, slots=1)
    assert caches.bytes_per_block == 890 * 256
    assert caches.global_kv[2].shape == (1, 128, 288)
    assert caches.global_kv[20].shape == (1, 256, 288)
    assert caches.index_keys[20].shape == (1, 256, 68)
    assert caches.windows[39].shape == caches.draft_windows[2].shape == (1, 140, 528)
    assert set(caches.groups) == {2, 8, 14}


def test_bytes_of_a_token_follow_from_entries_and_records() -> None:
    """Invariant (vi): two sources of ratio 2 and one of ratio 1 write 2 entries and 2 index keys a token."""
    config = golden_config()
    caches = allocate(config, formats=PLAIN)
    assert caches.bytes_per_block == config.block_tokens * 2 * 4 * (config.head_dim + config.index_head_dim)


def test_a_slots_bytes_are_those_of_its_rings() -> None:
    config = golden_config()
    caches = allocate(config)
    rows = (10 + 3) * caches.ring_rows * 66
    assert caches.bytes_per_slot == rows + 2 * caches.group_ring_rows * 2 * config.head_dim * 4


def test_an_encoder_has_no_rings_above_the_last_source_and_no_drafts() -> None:
    caches = allocate(golden_config(), role=ModelRole.ENCODER)
    assert sorted(caches.windows) == list(range(7))
    assert not caches.draft_windows
    assert sorted(caches.global_kv) == sorted(caches.index_keys) == [2, 4, 6]


def test_unfinished_groups_survive_two_rejected_steps() -> None:
    config = golden_config(num_hidden_layers=2, compress_ratios=[4, 1], **SOURCES)
    assert allocate(config, formats=PLAIN).group_ring_rows >= 4 + 2 * (config.dspark_block_size + 1)


SOURCES: dict[str, object] = {
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1],
    "candidate_source_layer_id": 1,
    "engram_layer_ids": [],
    "num_nextn_predict_layers": 0,
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"block_tokens": 15}, "block_tokens"), ({"block_tokens": 0}, "block_tokens"), ({"ring_rows": 27}, "ring_rows")],
)
def test_sizes_that_do_not_fit_the_model_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        allocate(golden_config(), **changes)


def test_quantised_caches_refuse_heads_that_do_not_fill_groups() -> None:
    config = golden_config(index_head_dim=40)
    with pytest.raises(ConfigError, match="index_head_dim 40"):
        allocate(config)
    assert allocate(config, formats=PLAIN).index_keys[2].shape[-1] == 160


def test_groups_are_kept_in_the_dtype_that_the_network_calculates_in() -> None:
    assert allocate(golden_config(), dtype=torch.float64).groups[2].dtype is torch.float64
