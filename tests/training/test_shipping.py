"""A checkpoint is read back as it was written, to train it further."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.training.test_backbone import weights
from whalepod.training.draft_trainer import as_shipped
from whalepod.training.parameters import first_tensors, stacked
from whalepod.training.shipping import read_trained_checkpoint, write_trained_checkpoint


def test_a_checkpoint_gives_back_what_was_written_rounded(tmp_path: Path) -> None:
    config = weights().config
    tensors = stacked(first_tensors(config, seed=3))
    write_trained_checkpoint(tmp_path, tensors, size="smoke")
    read = read_trained_checkpoint(tmp_path, config)
    assert set(read) == set(tensors)
    wrong = [name for name, tensor in tensors.items() if not torch.equal(as_shipped(name, tensor), read[name])]
    assert not wrong
