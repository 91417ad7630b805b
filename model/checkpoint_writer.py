"""Writes a checkpoint directory in the released layout: `config.json`, `tokenizer.json`, weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from whalepod.core.errors import ConfigError

from .checkpoint import INDEX_FILE, SINGLE_FILE
from .config import CONFIG_FILE, ModelConfig
from .tensor_layout import Part, Storage, TensorSpec, tensor_specs
from .tokenizer import TOKENIZER_FILE
from .weight_formats import encode_fp8_blocks, encode_fp8_rows, encode_mxfp4
from .weights_fingerprint import SUMS_FILE

RELEASE_SHARDS = 2
"""Weight files of a quantised checkpoint: more than one, so that the index is used."""


class WeightFormat(Enum):
    FLOAT32 = "float32"
    """Plain float32 in one file."""
    BFLOAT16 = "bfloat16"
    """Plain bfloat16; mixing coefficients, sinks and routing biases float32. The drafter has a file of its own."""
    RELEASE = "release"
    """As released: E4M3 linears, packed experts, E4M3 n-gram tables, the rest bfloat16 and float32; sharded."""


def prepare_directory(directory: Path, *, force: bool) -> None:
    """Make the directory, or with `force` clear it of an older checkpoint. Other files are left alone.

    Raises ConfigError if it is not empty and `force` is not set.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        return
    if not force:
        raise ConfigError(f"{directory} is not empty; --force replaces the checkpoint in it")
    # config.json goes first: without it, what is left is no checkpoint.
    for pattern in (CONFIG_FILE, TOKENIZER_FILE, SUMS_FILE, INDEX_FILE, "model*.safetensors"):
        for path in directory.glob(pattern):
            path.unlink()


def write_checkpoint(
    directory: Path,
    config_json: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer_json: str,
    *,
    form: WeightFormat,
) -> None:
    """Write float32 `tensors` (by name, every one of the configuration) in `form`. `config.json` comes last."""
    config = ModelConfig.from_json(config_json)
    stored: dict[str, Tensor] = {}
    for spec in tensor_specs(config):
        stored |= (
            _encode(spec, tensors, config) if form is WeightFormat.RELEASE else {spec.name: _plain(spec, tensors, form)}
        )
    if form is WeightFormat.FLOAT32:
        save_file(stored, directory / SINGLE_FILE)
    else:
        _write_shards(directory, _split(stored.items()) if form is WeightFormat.RELEASE else _by_part(stored, config))
    (directory / TOKENIZER_FILE).write_text(tokenizer_json, encoding="utf-8")
    (directory / CONFIG_FILE).write_text(json.dumps(config_json, indent=1) + "\n", encoding="utf-8")


def _plain(spec: TensorSpec, tensors: Mapping[str, Tensor], form: WeightFormat) -> Tensor:
    wide = spec.float32 or form is WeightFormat.FLOAT32
    return tensors[spec.name].to(torch.float32 if wide else torch.bfloat16).contiguous()


def _encode(spec: TensorSpec, tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """What a quantised checkpoint stores for one tensor."""
    values = tensors[spec.name]
    if spec.storage is Storage.PLAIN:
        return {spec.name: values if spec.float32 else values.to(torch.bfloat16)}
    assert config.quantization_config is not None, "quantised weights need a quantization_config"
    rows, columns = config.quantization_config.weight_block_size
    if spec.storage is Storage.FP8_BLOCKS:
        codes, scales = encode_fp8_blocks(values, (rows, columns))
    elif spec.storage is Storage.FP8_ROWS:
        codes, scales = encode_fp8_rows(values)
    else:
        codes, scales = encode_mxfp4(values)
    return {spec.name: codes, spec.scale_name: scales.view(torch.float8_e8m0fnu)}


def _write_shards(directory: Path, shards: Sequence[Mapping[str, Tensor]]) -> None:
    names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(dict(shard), directory / name)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _split(items: Iterable[tuple[str, Tensor]]) -> list[dict[str, Tensor]]:
    """RELEASE_SHARDS parts of about the same number of tensors, in order."""
    ordered = list(items)
    share = -(-len(ordered) // RELEASE_SHARDS)
    return [dict(ordered[start : start + share]) for start in range(0, len(ordered), share)]


def _by_part(stored: Mapping[str, Tensor], config: ModelConfig) -> list[dict[str, Tensor]]:
    """The drafter's tensors last and apart: training it anew replaces one file."""
    draft = {spec.name for spec in tensor_specs(config) if spec.part is Part.DRAFT}
    shards = [{name: stored[name] for name in stored if (name in draft) is drafts} for drafts in (False, True)]
    return [shard for shard in shards if shard]
