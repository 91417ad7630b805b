"""Writes a trained model as a checkpoint that any rank loads, and reads one to train it further."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from whalepod.model.checkpoint import load_engram_tables, load_tensors, load_vision_tensors
from whalepod.model.checkpoint_writer import WeightFormat, prepare_directory, write_checkpoint
from whalepod.model.config import ModelConfig
from whalepod.model.tiny_checkpoint import shipped_tokenizer

from .configuration import trained_config_json
from .parameters import stacked, unstacked


def write_trained_checkpoint(directory: Path, tensors: Mapping[str, Tensor], *, size: str) -> None:
    """`tensors` by stacked name -> `directory` in the released layout, bfloat16. Replaces a checkpoint that is there;
    other files are left alone."""
    tokenizer = shipped_tokenizer()
    prepare_directory(directory, force=True)
    plain = {name: tensor.detach().cpu().float() for name, tensor in unstacked(tensors).items()}
    write_checkpoint(
        directory, trained_config_json(tokenizer, size=size), plain, tokenizer.json, form=WeightFormat.BFLOAT16
    )


def read_trained_checkpoint(directory: Path, config: ModelConfig) -> dict[str, Tensor]:
    """What `write_trained_checkpoint` was given, rounded as it was written: float32 by stacked name. Raises
    CheckpointError."""
    tensors = load_tensors(directory, config, dtype=torch.float32)
    tensors |= load_vision_tensors(directory, config, dtype=torch.float32)
    for layer, table in load_engram_tables(directory, config, dtype=torch.float32).items():
        tensors[f"layers.{layer}.engram.embed.weight"] = table.rows(torch.arange(len(table.codes)))
    return stacked(tensors)
