"""The model as one rank holds it: weights of its role, and what the rest of the engine must know about its state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from whalepod.core.errors import ConfigError
from whalepod.core.progress import MIB, ProgressReport
from whalepod.kernels.kernel_names import name_by_source
from whalepod.kernels.launch_sizes import architecture_of, exact_fingerprint, use_table
from whalepod.kernels.native import library
from whalepod.kernels.quantise import FP8_BLOCK32, PackedFormat
from whalepod.kvstore.namespace import Namespace
from whalepod.kvstore.value_format import BlockLayout
from whalepod.model.caches import Caches
from whalepod.model.checkpoint import shard_paths
from whalepod.model.config import ModelConfig
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS, CacheFormats, RecordFormat, plain_formats
from whalepod.model.routed_experts import LocalExperts
from whalepod.model.tensor_layout import ModelRole
from whalepod.model.tokenizer import Tokenizer
from whalepod.model.weights_fingerprint import weights_fingerprint

from .boundaries import Boundaries
from .context_parallel.loop import ContextShare
from .expert_parallel.seat import PooledExperts, Seat
from .rank_shape import RankShape
from .state_image import block_layout

log = logging.getLogger(__name__)

DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""What a network works in on a kind of device, whatever the files hold: the reference kernels in float32."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """Ready to run. `namespace` and `block_layout` are what a `KvClient` of this rank is built with."""

    network: Network
    formats: CacheFormats
    boundaries: Boundaries
    namespace: bytes
    """16 bytes: ranks whose state is interchangeable agree on it (`kvstore.md` §2.1)."""
    weights: str
    """Their fingerprint, as hex."""
    layout: str
    """What is behind `namespace`, readable."""
    block_layout: BlockLayout
    tokenizer: Tokenizer
    experts: PooledExperts | None = None
    """Of a rank that shares the experts with others."""
    context: ContextShare | None = None
    """Of a rank that divides prompts with others."""

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        role: ModelRole = ModelRole.FULL,
        block_tokens: int | None = None,
        quantized_caches: bool = True,
        threads: int = 1,
        kept_rows: int | None = None,
        device: str = "cpu",
        cpu_operators: bool | None = None,
        launch_table_file: Path | None = None,
        seat: Seat | None = None,
        before_loading: Callable[[RankShape], None] | None = None,
    ) -> Self:
        """Read the weights of `role` to `device` (`cpu`, `cuda`, `cuda:1`). `block_tokens` None: the model's. Results
        depend on the kind of device, not on `threads`. `cpu_operators`: whether the process calculates with the
        compiled ones (`kernels/native`); None: as it does already, which is with them if they are there.
        `launch_table_file`: sizes that kernels are launched with on a GPU (`kernels/launch_sizes.py`). `kept_rows`:
        as many as the model must have. With a `seat`, only the experts that the rank holds are read: it computes within
        its group (`expert_parallel/`) only.
        `before_loading` may refuse what it is shown.

        Sets the threads and the operators of the process. Raises ConfigError or CheckpointError.
        """
        place = usable_device(device)
        set_arithmetic(place, threads=threads, cpu_operators=cpu_operators, launch_table_file=launch_table_file)
        dtype = DTYPES[place.type]
        config = ModelConfig.from_dir(model_dir)
        config.check_kept_rows(kept_rows)
        boundaries = Boundaries(config, config.block_tokens if block_tokens is None else block_tokens)
        formats = RELEASE_FORMATS if quantized_caches else plain_formats(dtype)
        input_format = FP8_BLOCK32 if config.quantization_config is not None else None
        experts = None if seat is None else PooledExperts.at(seat, model_dir, config, role=role, dtype=dtype)
        if before_loading is not None:
            before_loading(RankShape(config, role, boundaries, formats, dtype, place, experts))
        what = f"weights of role {role.value}" if seat is None else f"weights of role {role.value}, {seat}"
        with ProgressReport(what, unit="MiB", unit_size=MIB, say=log.info) as reading:
            network = Network.load(
                model_dir,
                role=role,
                dtype=dtype,
                input_format=input_format,
                device=place,
                make_experts=LocalExperts.from_weights if experts is None else experts.bank.make,
                wanted=None if experts is None else experts.wanted,
                progress=reading.note,
            )
            reading.finish()
        tokenizer = Tokenizer.from_dir(model_dir)
        identity = StateIdentity.of(
            model_dir, boundaries, formats, tokenizer, dtype=network.dtype, device=network.device
        )
        return cls(
            network=network,
            formats=formats,
            boundaries=boundaries,
            namespace=identity.namespace,
            weights=identity.weights,
            layout=identity.layout,
            block_layout=identity.block_layout,
            tokenizer=tokenizer,
            experts=experts,
        )

    @property
    def config(self) -> ModelConfig:
        return self.network.config

    @property
    def role(self) -> ModelRole:
        return self.network.role

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype

    @property
    def block_tokens(self) -> int:
        return self.boundaries.block_tokens

    def allocate(self, *, blocks: int, slots: int) -> Caches:
        """Zeroed caches of this role."""
        return _allocate(
            self.config,
            self.formats,
            self.boundaries,
            blocks=blocks,
            slots=slots,
            role=self.role,
            device=self.network.device,
        )


@dataclass(frozen=True, slots=True)
class StateIdentity:
    """What processes that exchange state agree on; known without loading a network."""

    namespace: bytes
    weights: str
    layout: str
    block_layout: BlockLayout

    @classmethod
    def of(
        cls,
        model_dir: Path | str,
        boundaries: Boundaries,
        formats: CacheFormats,
        tokenizer: Tokenizer,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Of ranks that calculate in `dtype` on a device of this kind. Raises CheckpointError."""
        config = boundaries.config
        namespace = namespace_of(
            boundaries,
            formats,
            weights=_fingerprint(model_dir),
            tokenizer=tokenizer.fingerprint,
            numerics=numerics_name(device, dtype),
        )
        weights = namespace.weights_fingerprint.hex()
        return cls(
            namespace=namespace.id,
            weights=weights,
            layout=(
                f"weights {weights[:12]}, blocks of {boundaries.block_tokens} tokens, "
                f"window {config.window}, {config.kept_rows} kept rows, {formats.name} caches, {namespace.numerics}"
            ),
            block_layout=block_layout(_allocate(config, formats, boundaries, blocks=1, slots=1)),
        )


def usable_device(name: str) -> torch.device:
    """Raises ConfigError if there is no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}") from None
    if device.type not in DTYPES:
        raise ConfigError(f"device must be cpu, cuda or cuda:N, not {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(f"device {name} is not there: PyTorch {torch.__version__} sees {count} GPUs here")
    return device


def set_arithmetic(
    device: torch.device, *, threads: int, cpu_operators: bool | None, launch_table_file: Path | None = None
) -> None:
    """How this process calculates from here on, as `RankModel.load` says; before its `numerics_name` is asked for.
    Raises ConfigError on a table that cannot be used here."""
    torch.set_num_threads(threads)
    if device.type == "cpu":
        library.decide(wanted=cpu_operators)
        if launch_table_file is not None:
            raise ConfigError(f"launch_table_file is {launch_table_file}, and a CPU launches no kernels: leave it out")
    else:
        name_by_source()
        if launch_table_file is not None:
            use_table(launch_table_file, architecture_of(device))


def numerics_name(device: torch.device, dtype: torch.dtype) -> str:
    """How a rank calculates: ranks that do so alike write the same state."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        operators = library.in_use() and dtype is torch.float32
        return f"cpu operators {library.NUMERICS}, {name}" if operators else f"cpu reference, {name}"
    sizes = exact_fingerprint(architecture_of(device))
    return f"{torch.cuda.get_device_name(device)}, launch sizes {sizes}, {name}"


def namespace_of(
    boundaries: Boundaries, formats: CacheFormats, *, weights: bytes, tokenizer: bytes, numerics: str
) -> Namespace:
    """Everything that must match for two ranks to exchange state. Roles do not: they write the same rows."""
    config = boundaries.config
    rope = config.rope(config.last_kv_source)
    return Namespace(
        model_id="deepseek_v41",
        weights_fingerprint=weights,
        prompt_version=tokenizer.hex(),
        compress_ratios=config.compress_ratios,
        kv_sources=config.kv_source_layer_ids,
        index_sources=config.index_source_layer_ids,
        window_tokens=config.window,
        rope={"plain_theta": config.rope_theta, "theta": rope.theta, "factor": rope.factor, "dim": rope.dim},
        record_formats={
            "GLOBAL_KV": _format_name(formats.global_kv),
            "INDEX_KEYS": _format_name(formats.index_key),
            "WINDOW_ROWS": _format_name(formats.window),
        },
        block_tokens=boundaries.block_tokens,
        layout="canonical",
        truncation="compact",
        kept_rows=config.kept_rows,
        has_draft=config.num_nextn_predict_layers > 0,
        numerics=numerics,
    )


def _fingerprint(model_dir: Path | str) -> bytes:
    """Of the weights. Reads all that `SHA256SUMS` does not name, which may take as long as loading them."""
    total = sum(path.stat().st_size for path in shard_paths(Path(model_dir)))
    with ProgressReport("hashing the weights", unit="MiB", unit_size=MIB, total=total, say=log.info) as hashing:
        return weights_fingerprint(model_dir, progress=hashing.advance)


def _allocate(
    config: ModelConfig,
    formats: CacheFormats,
    boundaries: Boundaries,
    *,
    blocks: int,
    slots: int,
    role: ModelRole = ModelRole.FULL,
    device: torch.device | str = "cpu",
) -> Caches:
    tokens = boundaries.block_tokens
    return Caches.allocate(
        config, blocks=blocks, slots=slots, formats=formats, block_tokens=tokens, role=role, device=device
    )


def _format_name(record_format: RecordFormat) -> str:
    if isinstance(record_format, PackedFormat):
        return f"{record_format.element.value}, {record_format.scale.value} per {record_format.group}"
    return str(record_format.dtype)
