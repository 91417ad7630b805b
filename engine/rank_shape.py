"""What a rank's memory depends on, known before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import CacheFormats
from whalepod.model.tensor_layout import ModelRole

from .boundaries import Boundaries
from .expert_parallel.seat import PooledExperts


@dataclass(frozen=True, slots=True)
class RankShape:
    """A model in its role, on its device, without weights."""

    config: ModelConfig
    role: ModelRole
    boundaries: Boundaries
    formats: CacheFormats
    dtype: torch.dtype
    device: torch.device
    experts: PooledExperts | None

    @property
    def block_tokens(self) -> int:
        return self.boundaries.block_tokens

    def allocate(self, *, blocks: int, slots: int) -> Caches:
        """Zeroed caches of this role."""
        return Caches.allocate(
            self.config,
            blocks=blocks,
            slots=slots,
            formats=self.formats,
            block_tokens=self.block_tokens,
            role=self.role,
            device=self.device,
        )
