"""What a training run leaves on disk to go on from: tensors in files below a size, and its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

META = "meta.json"
SHARD_BYTES_MAX = 15_000_000


def save_state(directory: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, prefix: str) -> None:
    """Write `tensors` as `PREFIX-N.safetensors`, whole files only, then `meta`."""
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if used and used + tensor.nbytes > SHARD_BYTES_MAX:
            shards.append({})
            used = 0
        used += tensor.nbytes
        shards[-1][name] = tensor.detach().cpu().contiguous()
    for number, shard in enumerate(shards):
        unfinished = directory / f"{prefix}-{number}.unfinished"
        save_file(shard, unfinished)
        unfinished.replace(directory / f"{prefix}-{number}.safetensors")
    (directory / META).write_text(json.dumps(meta) + "\n", encoding="utf-8")


def load_state(directory: Path, *, prefix: str) -> dict[str, Tensor]:
    """Undoes `save_state`."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob(f"{prefix}-*.safetensors")):
        tensors |= load_file(path)
    return tensors


def load_meta(directory: Path) -> dict[str, Any]:
    return json.loads((directory / META).read_text(encoding="utf-8"))


def narrowed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Optimiser state in bfloat16 but for single numbers: half the bytes, and noise that it can bear."""
    return {name: tensor.to(torch.bfloat16) if tensor.numel() > 1 else tensor for name, tensor in tensors.items()}
