"""One folder of golden vectors: checkpoints (`ckpt_*`), prompts, and a file per set and precision mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from whalepod.core.errors import CheckpointError
from whalepod.kernels.quantise import FP8_BLOCK32

from .config import CONFIG_FILE, ModelConfig
from .conformity import Vectors
from .network import Network
from .record_formats import RELEASE_FORMATS, CacheFormats, plain_formats
from .vision.encoder import VisionEncoder

PROMPTS = "prompts.safetensors"
CHECKPOINT_PREFIX = "ckpt_"


class Mode(Enum):
    """How the reference calculated (`tests/golden/README.md`, "Precision modes")."""

    F32 = "f32"
    KVQ = "kvq"
    DEQUANT_F32 = "dequant_f32"
    DEQUANT_KVQ = "dequant_kvq"
    RELEASE_BF16 = "release_bf16"
    OURS_BF16 = "ours_bf16"
    """No mode of the reference: our network in bfloat16 with quantised caches, as a GPU serves it, against vectors of
    `f32` or `kvq`."""

    @property
    def rounded(self) -> bool:
        return self in (Mode.RELEASE_BF16, Mode.OURS_BF16)

    @property
    def quantised_weights(self) -> bool:
        return self not in (Mode.F32, Mode.KVQ, Mode.OURS_BF16)

    @property
    def quantised_caches(self) -> bool:
        return self not in (Mode.F32, Mode.DEQUANT_F32)


@dataclass(frozen=True, slots=True)
class SetFile:
    """A file of vectors. `kind` is its set (`prefill`), None if it holds several, each below a prefix."""

    path: Path
    kind: str | None
    mode: Mode


@dataclass(slots=True)
class VectorFolder:
    path: Path
    name: str
    """Path below the directory that was asked for."""
    device: str = "cpu"
    """Where networks run."""
    checkpoints: dict[str, ModelConfig] = field(default_factory=dict)
    """Directory name -> configuration."""
    _networks: dict[tuple[str, torch.dtype, bool], Network] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, name: str, *, device: str = "cpu") -> VectorFolder:
        """Raises ConfigError for a checkpoint whose configuration is none."""
        folder = cls(path, name, device)
        for directory in sorted(path.glob(f"{CHECKPOINT_PREFIX}*")):
            if (directory / CONFIG_FILE).is_file():
                folder.checkpoints[directory.name] = ModelConfig.from_dir(directory)
        return folder

    def files(self) -> Iterator[Path]:
        """Every file of vectors, prompts apart."""
        return (path for path in sorted(self.path.glob("*.safetensors")) if path.name != PROMPTS)

    def prompts(self) -> Vectors:
        return Vectors.load(self.path / PROMPTS) if (self.path / PROMPTS).is_file() else Vectors({})

    def checkpoint(self, mode: Mode) -> Path:
        """The directory of the checkpoint that vectors of `mode` belong to. Raises CheckpointError if there is none.

        A checkpoint fits if its weights are quantised or not, as the mode wants; of several, the one named after it.
        """
        fitting = [
            name
            for name, config in self.checkpoints.items()
            if (config.quantization_config is not None) == mode.quantised_weights
        ]
        if not fitting:
            wanted = "quantised" if mode.quantised_weights else "unquantised"
            raise CheckpointError(f"{self.path} has no {wanted} {CHECKPOINT_PREFIX}* directory for mode {mode.value}")
        named = [name for name in fitting if name == f"{CHECKPOINT_PREFIX}{mode.value}"]
        return self.path / (named or fitting)[0]

    def network(self, mode: Mode, *, dtype: torch.dtype | None = None) -> Network:
        """The network of `mode`, loaded once; in float32 (bfloat16 in `release_bf16`) unless `dtype` is given."""
        release = mode is Mode.RELEASE_BF16
        dtype = dtype or (torch.bfloat16 if mode.rounded else torch.float32)
        checkpoint = self.checkpoint(mode)
        key = (checkpoint.name, dtype, release)
        if key not in self._networks:
            self._networks[key] = Network.load(
                checkpoint, dtype=dtype, input_format=FP8_BLOCK32 if release else None, device=self.device
            )
        return self._networks[key]

    def vision_encoder(self, mode: Mode) -> VisionEncoder:
        """In float32 (bfloat16 where the network of `mode` is)."""
        dtype = torch.bfloat16 if mode.rounded else torch.float32
        return VisionEncoder.load(self.checkpoint(mode), dtype=dtype, device=self.device)


def cache_formats(mode: Mode, dtype: torch.dtype) -> CacheFormats:
    return RELEASE_FORMATS if mode.quantised_caches else plain_formats(dtype)


def parse_file(path: Path) -> SetFile | None:
    """`prefill_f32`, `detail_dequant_kvq`: set and mode. `kvq_f32`, `release_bf16`: several sets, of mode `kvq` on the
    weights of `f32`, or of that mode. None for other names."""
    # The longest mode first: dequant_f32 is no set of mode f32.
    for mode in sorted(set(Mode) - {Mode.OURS_BF16}, key=lambda mode: -len(mode.value)):
        kind = path.stem.removesuffix(mode.value)
        if kind == "":
            return SetFile(path, None, mode)
        if kind == "kvq_":
            return SetFile(path, None, Mode.DEQUANT_KVQ if mode.quantised_weights else Mode.KVQ)
        if kind != path.stem and kind.endswith("_"):
            return SetFile(path, kind.removesuffix("_"), mode)
    return None


def vector_folders(directory: Path) -> list[Path]:
    """Every folder at or below `directory` that holds a checkpoint or prompts."""
    found = {path.parent for path in directory.rglob(f"{CHECKPOINT_PREFIX}*") if (path / CONFIG_FILE).is_file()}
    return sorted(found | {path.parent for path in directory.rglob(PROMPTS)})
