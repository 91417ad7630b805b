"""A rank's seat in a pool whose ranks share the experts: which it reads at start, and how it reads those of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whalepod.core.errors import ConfigError
from whalepod.model.checkpoint import load_tensors
from whalepod.model.config import ModelConfig
from whalepod.model.projection import Weights
from whalepod.model.routed_experts import gate_up_matrix
from whalepod.model.tensor_layout import ModelRole, TensorSpec

from .expert_bank import ExpertBank
from .group_loop import GroupLoop
from .placement import Placement, even_placement


@dataclass(frozen=True, slots=True)
class Seat:
    """Rank `index` of `size`. `redundant`: slots of a layer beyond one for each expert, over the whole pool."""

    index: int
    size: int
    redundant: int = 0

    def __str__(self) -> str:
        return f"rank {self.index} of {self.size} that share the experts"

    def placements(self, config: ModelConfig) -> dict[str, Placement]:
        """Before any load is known, by prefix. Draft blocks get redundant slots in proportion.

        Raises ConfigError if there are fewer slots than ranks.
        """
        slots = config.n_routed_experts + self.redundant
        if slots < self.size:
            raise ConfigError(f"{slots} expert slots are too few for {self.size} ranks: set redundant_experts")
        target = even_placement(config.n_routed_experts, self.size, redundant=self.redundant)
        placements = {f"layers.{layer}.ffn.": target for layer in range(config.num_hidden_layers)}
        if config.num_nextn_predict_layers:
            experts = config.dspark_n_routed_experts
            draft = even_placement(experts, self.size, redundant=self.redundant * experts // config.n_routed_experts)
            placements |= {f"mtp.{block}.ffn.": draft for block in range(config.num_nextn_predict_layers)}
        return placements


@dataclass(slots=True)
class PooledExperts:
    """What a rank with a seat holds and reads, and where it computes."""

    seat: Seat
    config: ModelConfig
    directory: Path
    role: ModelRole
    dtype: torch.dtype
    placements: Mapping[str, Placement]
    bank: ExpertBank
    loop: GroupLoop | None = None
    """Set by whoever runs it, before the engine is made."""

    @classmethod
    def at(
        cls, seat: Seat, directory: Path | str, config: ModelConfig, *, role: ModelRole, dtype: torch.dtype
    ) -> PooledExperts:
        placements = seat.placements(config)
        bank = ExpertBank(seat.index, placements)
        return cls(seat, config, Path(directory), role, dtype, placements, bank)

    @property
    def slots_per_rank(self) -> dict[str, int]:
        """The most that a rank of the whole pool has, by prefix."""
        return {prefix: max(map(len, placement.ranks)) for prefix, placement in self.placements.items()}

    def wanted(self, spec: TensorSpec) -> bool:
        """Whether this rank reads a tensor at start: everything but experts of others."""
        place = spec.expert
        return place is None or place[1] in self.placements[place[0]].ranks[self.seat.index]

    def read(self, experts: Mapping[str, Sequence[int]]) -> dict[str, tuple[Tensor, Tensor]]:
        """gate_up [experts, 2 · M, D] and down [experts, D, M] of these experts, by prefix, from the checkpoint."""
        chosen = {(prefix, expert) for prefix, its_experts in experts.items() for expert in its_experts}
        tensors = load_tensors(
            self.directory, self.config, role=self.role, dtype=self.dtype, wanted=lambda spec: spec.expert in chosen
        )
        read: dict[str, tuple[Tensor, Tensor]] = {}
        for prefix, its_experts in experts.items():
            weights = Weights(tensors, prefix)
            read[prefix] = (
                torch.stack([gate_up_matrix(weights, f"experts.{expert}") for expert in its_experts]),
                torch.stack([weights[f"experts.{expert}.w2.weight"] for expert in its_experts]),
            )
        return read
