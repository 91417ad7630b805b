"""Reads the weights of a role from a checkpoint directory: `config.json` plus `model.safetensors`, or shards with
`model.safetensors.index.json`.

Each tensor is taken by name, checked, decoded (`weight_formats.py`) and copied to memory. N-gram tables stay where they
are: an `EngramTable` maps the file and decodes only the rows that are asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from whalepod.core.errors import CheckpointError

from .config import ModelConfig
from .mapped_memory import expect_random_reads
from .tensor_layout import ModelRole, Storage, TensorSpec, specs_for_role, stored_names, vision_specs
from .weight_formats import decode_fp8_blocks, decode_fp8_rows, decode_mxfp4

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
NAMES_SHOWN = 10

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Of what is stored; one byte for all others."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_BYTES = {"U8", "I8"}
_CODES = {
    Storage.FP8_BLOCKS: {"F8_E4M3"},
    Storage.FP8_ROWS: {"F8_E4M3"},
    Storage.MXFP4: _BYTES,
}
_SCALES = {"F8_E8M0", "U8"}


@dataclass(frozen=True, slots=True)
class EngramTable:
    """One n-gram layer's table, mapped from the file; rows are read and decoded when asked for."""

    codes: Tensor
    """[rows, width]: E4M3 codes, or plain floats."""
    scales: Tensor | None
    """[rows, width / 32] E8M0, None for plain tables."""
    dtype: torch.dtype

    @property
    def stored(self) -> list[Tensor]:
        """As bytes, [rows, bytes] uint8."""
        tensors = [self.codes] if self.scales is None else [self.codes, self.scales]
        return [tensor.view(torch.uint8) for tensor in tensors]

    def rows(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> the rows [..., width] in `dtype`."""
        flat = ids.reshape(-1)
        if self.scales is None:
            values = self.codes.index_select(0, flat)
        else:
            codes = self.codes.view(torch.uint8).index_select(0, flat)
            values = decode_fp8_rows(codes, self.scales.view(torch.uint8).index_select(0, flat))
        return values.to(self.dtype).view(*ids.shape, -1)


def load_tensors(
    directory: Path | str,
    config: ModelConfig,
    *,
    role: ModelRole = ModelRole.FULL,
    dtype: torch.dtype = torch.bfloat16,
    wanted: Callable[[TensorSpec], bool] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """Every tensor of `role` but the n-gram tables, by its name in the file, contiguous, in `dtype` and on `device`.
    With `wanted`, only the bytes of those tensors are read. `progress` is told bytes read and bytes in all.

    Mixing coefficients (`hc_*`), `attn_sink` and the routing biases are kept in at least float32.
    Raises CheckpointError naming tensors that are missing, unexpected, misshapen or of a dtype that they cannot have.
    """
    return _load(
        directory, config, specs_for_role(config, role), dtype=dtype, wanted=wanted, device=device, progress=progress
    )


def load_vision_tensors(
    directory: Path | str,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Every tensor of the vision encoder, as `load_tensors` gives those of the text model. Raises CheckpointError."""
    return _load(directory, config, vision_specs(config), dtype=dtype, device=device)


def holds_vision(directory: Path | str, config: ModelConfig) -> bool:
    """Whether a tensor of the vision encoder is there; a checkpoint may be of the text model alone. Raises
    CheckpointError."""
    with _Files(Path(directory)) as files:
        return any(files.holds(spec) for spec in vision_specs(config))


def _load(
    directory: Path | str,
    config: ModelConfig,
    specs: Sequence[TensorSpec],
    *,
    dtype: torch.dtype,
    wanted: Callable[[TensorSpec], bool] | None = None,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    with _Files(Path(directory)) as files:
        files.check(specs, config)
        chosen = [s for s in specs if s.storage is not Storage.FP8_ROWS and (wanted is None or wanted(s))]
        total, read = sum(map(files.stored_bytes, chosen)), 0
        tensors: dict[str, Tensor] = {}
        for spec in chosen:
            own = torch.promote_types(dtype, torch.float32) if spec.float32 else dtype
            tensors[spec.name] = files.read(spec, config).to(device=device, dtype=own)
            read += files.stored_bytes(spec)
            if progress is not None:
                progress(read, total)
        return tensors


def load_engram_tables(
    directory: Path | str,
    config: ModelConfig,
    *,
    role: ModelRole = ModelRole.FULL,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[int, EngramTable]:
    """The n-gram table of each n-gram layer, by layer id. Rows come out in `dtype`. Raises CheckpointError."""
    with _Files(Path(directory)) as files:
        specs = [spec for spec in specs_for_role(config, role) if spec.storage is Storage.FP8_ROWS]
        files.check(specs, config)
        return {int(spec.name.split(".")[1]): files.table(spec, dtype) for spec in specs}


def check_tensors(directory: Path | str, config: ModelConfig, *, role: ModelRole = ModelRole.FULL) -> int:
    """How many tensors `role` reads, scales not counted. Reads headers only; raises CheckpointError as loading does."""
    with _Files(Path(directory)) as files:
        specs = specs_for_role(config, role)
        files.check(specs, config)
        return len(specs)


def shard_paths(directory: Path) -> list[Path]:
    """The weight files of a checkpoint, sorted by name. Raises CheckpointError if there are none or one is missing."""
    index = directory / INDEX_FILE
    if not index.exists():
        paths = [directory / SINGLE_FILE]
    else:
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{index} has no readable weight_map: {error!r}") from error
        paths = sorted(directory / str(name) for name in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{directory} lacks {_shown(missing)}")
    return paths


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Any
    """An open safetensors file; the package has no type for it."""
    dtype: str
    shape: tuple[int, ...]


class _Files:
    """The open files of a checkpoint and what their headers say. Tensors that were mapped outlive it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self._entries: dict[str, _Entry] = {}

    def __enter__(self) -> Self:
        try:
            for path in shard_paths(self._directory):
                self._add(path)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _add(self, path: Path) -> None:
        try:
            file: Any = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in self._entries:
                raise CheckpointError(f"{name} is stored twice, the second time in {path.name}")
            header = file.get_slice(name)
            self._entries[name] = _Entry(file, header.get_dtype(), tuple(header.get_shape()))

    def holds(self, spec: TensorSpec) -> bool:
        return spec.name in self._entries

    def check(self, specs: Iterable[TensorSpec], config: ModelConfig) -> None:
        """Raise CheckpointError unless every tensor of `specs` is there as it should be, and nothing is unknown."""
        missing: list[str] = []
        wrong: list[str] = []
        for spec in specs:
            for name, dtypes, shape in self._wanted(spec, config):
                entry = self._entries.get(name)
                if entry is None:
                    missing.append(name)
                elif entry.shape != shape:
                    wrong.append(f"{name} has shape {list(entry.shape)}, not {list(shape)}")
                elif entry.dtype not in dtypes:
                    wrong.append(f"{name} is stored as {entry.dtype}, not {' or '.join(sorted(dtypes))}")
        unexpected = sorted(self._entries.keys() - stored_names(config))
        problems = [f"missing {_shown(missing)}"] if missing else []
        problems += [f"unexpected {_shown(unexpected)}"] if unexpected else []
        problems += [f"misshapen {_shown(wrong)}"] if wrong else []
        if problems:
            raise CheckpointError(f"{self._directory} does not fit its config.json: " + "; ".join(problems))

    def _wanted(self, spec: TensorSpec, config: ModelConfig) -> list[tuple[str, set[str], tuple[int, ...]]]:
        """(name, dtypes allowed, shape) of what has to be stored for `spec`."""
        entry = self._entries.get(spec.name)
        stored_plain = entry is not None and entry.dtype in _FLOATS
        if spec.storage is Storage.PLAIN or config.quantization_config is None or stored_plain:
            return [(spec.name, _FLOATS, spec.shape)]
        scale_shape = spec.scale_shape(_block(config))
        return [
            (spec.name, _CODES[spec.storage], spec.codes_shape()),
            (spec.scale_name, _SCALES, scale_shape),
        ]

    def stored_bytes(self, spec: TensorSpec) -> int:
        """Of a tensor's values, and of their scales if it has some."""
        entries = [self._entries.get(name) for name in dict.fromkeys((spec.name, spec.scale_name))]
        return sum(math.prod(entry.shape) * _ITEM_BYTES.get(entry.dtype, 1) for entry in entries if entry is not None)

    def read(self, spec: TensorSpec, config: ModelConfig) -> Tensor:
        """The tensor's values, in memory of its own: mapped weights would change with the file, and their alignment,
        which decides how a matrix product rounds, would depend on the file's header."""
        stored = self._tensor(spec.name)
        if self._entries[spec.name].dtype in _FLOATS:
            return stored.clone()
        scales = self._tensor(spec.scale_name)
        if spec.storage is Storage.MXFP4:
            return decode_mxfp4(stored, scales)
        return decode_fp8_blocks(stored, scales, _block(config))

    def table(self, spec: TensorSpec, dtype: torch.dtype) -> EngramTable:
        plain = self._entries[spec.name].dtype in _FLOATS
        table = EngramTable(self._tensor(spec.name), None if plain else self._tensor(spec.scale_name), dtype)
        for tensor in table.stored:
            expect_random_reads(tensor)
        return table

    def _tensor(self, name: str) -> Tensor:
        return self._entries[name].file.get_tensor(name)


def _block(config: ModelConfig) -> tuple[int, int]:
    assert config.quantization_config is not None
    rows, columns = config.quantization_config.weight_block_size
    return rows, columns


def _shown(names: list[str]) -> str:
    """The first names and how many there are."""
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, … ({len(names)} in all)"
