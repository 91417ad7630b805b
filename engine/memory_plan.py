"""What a rank's memory is spent on, decided before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from whalepod.core.errors import ConfigError
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.tensor_layout import ModelRole, Storage, specs_for_role, vision_specs

from .boundaries import Boundaries
from .expert_parallel.seat import PooledExperts
from .options import RankOptions


class PlannedModel(Protocol):
    """A model that is loaded (`RankModel`), or one that is not yet (`RankShape`)."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def role(self) -> ModelRole: ...
    @property
    def boundaries(self) -> Boundaries: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def experts(self) -> PooledExperts | None: ...
    def allocate(self, *, blocks: int, slots: int) -> Caches: ...


CACHE_BYTES_DEFAULT = 2 << 30
"""For blocks if no limit is set: a laptop must survive a long context."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of everything that is resident while the rank runs."""

    weights_bytes: int
    slots: int
    slot_bytes: int
    blocks: int
    block_bytes: int
    context_tokens_max: int
    """Longest prompt plus answer: the model's, the option's, or what the blocks hold."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.slots * self.slot_bytes + self.blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"weights {_mib(self.weights_bytes)}, windows of {self.slots} slots {_mib(self.slots * self.slot_bytes)}, "
            f"{self.blocks} KV blocks {_mib(self.blocks * self.block_bytes)}, together {_mib(self.total_bytes)}; "
            f"longest context {self.context_tokens_max} tokens"
        )


def plan_memory(model: PlannedModel, options: RankOptions) -> MemoryPlan:
    """Raises ConfigError, with the numbers, if the options do not fit their memory."""
    probe = model.allocate(blocks=1, slots=1)
    model_max = model.config.max_position_embeddings
    context = min(options.context_tokens_max or model_max, model_max)
    context_blocks = model.boundaries.blocks(context)
    weights = weights_bytes(model)
    fixed = weights + options.slots * probe.bytes_per_slot
    limit = options.memory_bytes
    if options.blocks is not None:
        blocks = options.blocks
    else:
        room = CACHE_BYTES_DEFAULT if limit is None else limit - fixed
        blocks = min(options.slots * context_blocks, room // probe.bytes_per_block)
    plan = MemoryPlan(
        weights_bytes=weights,
        slots=options.slots,
        slot_bytes=probe.bytes_per_slot,
        blocks=blocks,
        block_bytes=probe.bytes_per_block,
        context_tokens_max=min(context, blocks * model.block_tokens),
    )
    if blocks < 1 or (limit is not None and plan.total_bytes > limit):
        raise ConfigError(f"memory_bytes {limit} is too little: {plan}")
    if options.context_tokens_max is not None and plan.context_tokens_max < options.context_tokens_max:
        raise ConfigError(f"context_tokens_max {options.context_tokens_max} does not fit: {plan}")
    return plan


def weights_bytes(model: PlannedModel) -> int:
    """Of the weights in memory. N-gram tables are mapped from their files and shared by all ranks of a machine."""
    experts = model.experts
    resident = (
        spec
        for spec in specs_for_role(model.config, model.role)
        if spec.storage is not Storage.FP8_ROWS and (experts is None or experts.wanted(spec))
    )
    return sum(math.prod(spec.shape) for spec in resident) * model.dtype.itemsize


def vision_bytes(model: PlannedModel) -> int:
    """Of the vision encoder, where a rank encodes images itself. Not in the plan: a checkpoint may lack it."""
    return sum(math.prod(spec.shape) for spec in vision_specs(model.config)) * model.dtype.itemsize


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
