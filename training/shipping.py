"""Writes a trained model as a checkpoint that any rank loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from whalepod.model.checkpoint_writer import WeightFormat, prepare_directory, write_checkpoint
from whalepod.model.tiny_checkpoint import shipped_tokenizer

from .configuration import trained_config_json
from .parameters import unstacked


def write_trained_checkpoint(directory: Path, tensors: Mapping[str, Tensor], *, size: str) -> None:
    """`tensors` by stacked name -> `directory` in the released layout, bfloat16. Replaces a checkpoint that is there;
    other files are left alone."""
    tokenizer = shipped_tokenizer()
    prepare_directory(directory, force=True)
    plain = {name: tensor.detach().cpu().float() for name, tensor in unstacked(tensors).items()}
    write_checkpoint(
        directory, trained_config_json(tokenizer, size=size), plain, tokenizer.json, form=WeightFormat.BFLOAT16
    )
