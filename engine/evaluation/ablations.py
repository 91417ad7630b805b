"""What each part of the network is worth: the same model without it.

A part that adds something is taken out by making its weights zero in a copy of the checkpoint, so that everything else,
loading included, stays what it is. What an indexer chooses is no weight: there it is told to take the newest entries.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from whalepod.core.errors import CheckpointError
from whalepod.engine.rank_model import RankModel
from whalepod.model.checkpoint import shard_paths
from whalepod.model.weights_fingerprint import SUMS_FILE

NamePredicate = Callable[[str], bool]

HEADER_LENGTH_BYTES: Final = 8


def is_engram_table(name: str) -> bool:
    """Without its table an n-gram layer remembers nothing, and lets nothing in."""
    return name.endswith(".engram.embed.weight")


def is_markov_head(name: str) -> bool:
    """Without it a draft does not know the one before it."""
    return name.endswith(".markov_head.head.weight")


@contextmanager
def zeroed_checkpoint(directory: Path, wanted: NamePredicate) -> Generator[Path]:
    """A copy of a checkpoint in which the `wanted` tensors are zero; it is gone when the block ends. Raises
    CheckpointError if there are none."""
    with TemporaryDirectory(prefix="whalepod-ablation-") as copy:
        target = Path(copy) / "model"
        shutil.copytree(directory, target, ignore=shutil.ignore_patterns(SUMS_FILE))
        zeroed = [name for shard in shard_paths(target) for name in zero_tensors(shard, wanted)]
        if not zeroed:
            raise CheckpointError(f"{directory} has no such part")
        yield target


def zero_tensors(path: Path, wanted: NamePredicate) -> list[str]:
    """Write zeros over the `wanted` tensors of a safetensors file, whatever their dtype: zero bytes are zeros in all
    formats of weights. Returns their names."""
    with path.open("r+b") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(HEADER_LENGTH_BYTES))
        header = json.loads(file.read(header_bytes))
        names = [name for name in header if name != "__metadata__" and wanted(name)]
        for name in names:
            start, end = header[name]["data_offsets"]
            file.seek(HEADER_LENGTH_BYTES + header_bytes + start)
            file.write(bytes(end - start))
    return names


def select_recent(model: RankModel) -> Sequence[int]:
    """Make every indexer of `model` choose the newest entries. Returns their layers."""
    changed: list[int] = []
    for place, layer in enumerate(model.network.layers):
        tail = layer.tail
        indexer = None if tail is None else tail.attention.indexer
        if tail is not None and indexer is not None:
            attention = replace(tail.attention, indexer=replace(indexer, recent=True))
            model.network.layers[place] = replace(layer, tail=replace(tail, attention=attention))
            changed.append(layer.number)
    return changed
