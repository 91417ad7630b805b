"""Which ranks may exchange state."""

from __future__ import annotations

import pytest
import torch

from tests.engine.engine_world import CHECKPOINT, tiny_model
from whalepod.core.errors import ConfigError
from whalepod.engine.boundaries import Boundaries
from whalepod.engine.rank_model import RankModel, namespace_of
from whalepod.model.record_formats import RELEASE_FORMATS, plain_formats
from whalepod.model.tensor_layout import ModelRole


def test_roles_share_a_namespace_and_a_block_layout() -> None:
    full, encoder = tiny_model(), tiny_model(ModelRole.ENCODER)
    assert full.namespace == encoder.namespace
    assert full.block_layout == encoder.block_layout
    assert full.layout == encoder.layout


def test_whatever_changes_the_bytes_changes_the_namespace() -> None:
    model = tiny_model()
    other_blocks = RankModel.load(CHECKPOINT, block_tokens=32)
    plain = RankModel.load(CHECKPOINT, quantized_caches=False)
    assert len({model.namespace, other_blocks.namespace, plain.namespace}) == 3
    boundaries = Boundaries(model.config, 16)
    names = {
        namespace_of(boundaries, formats, weights=weights, tokenizer=tokenizer, numerics=numerics).id
        for formats in (RELEASE_FORMATS, plain_formats(torch.float32))
        for weights in (b"a" * 32, b"b" * 32)
        for tokenizer in (b"a" * 32, b"b" * 32)
        for numerics in ("cpu reference, float32", "NVIDIA H200, bfloat16")
    }
    assert len(names) == 16


@pytest.mark.parametrize(
    ("device", "said"), [("tpu", "cpu, cuda or cuda:N"), ("meta", "cpu, cuda or cuda:N"), ("cuda:63", "sees .* GPUs")]
)
def test_a_device_that_is_not_there_is_refused_before_weights_are_read(device: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RankModel.load("no such directory", device=device)


def test_the_layout_is_readable() -> None:
    assert "blocks of 16 tokens, window 16, 28 kept rows, release caches" in tiny_model().layout
