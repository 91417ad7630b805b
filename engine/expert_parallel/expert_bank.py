"""The expert weights in a rank's slots, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from whalepod.model.projection import Weights
from whalepod.model.routed_experts import ExpertShape, RoutedExperts, stack_experts

from .placement import Placement

DRAFT_PREFIX = "mtp."


@dataclass(slots=True)
class LayerExperts:
    """The slots of one layer on this rank."""

    prefix: str
    """`layers.{layer}.ffn.` or `mtp.{block}.ffn.`."""
    shape: ExpertShape
    gate_up: Tensor
    """[slots, 2 · M, D]"""
    down: Tensor
    """[slots, D, M]"""
    slots: tuple[int, ...]
    """The expert in each slot."""

    def rearrange(self, slots: Sequence[int], read: Sequence[int], weights: tuple[Tensor, Tensor] | None) -> None:
        """Hold these experts from now on: those of `read` from `weights`, stacked in this order, others are here."""
        if tuple(slots) == self.slots:
            return
        gate_up = self.gate_up.new_empty(len(slots), *self.gate_up.shape[1:])
        down = self.down.new_empty(len(slots), *self.down.shape[1:])
        for slot, expert in enumerate(slots):
            if expert in self.slots:
                source = self.slots.index(expert)
                gate_up[slot], down[slot] = self.gate_up[source], self.down[source]
            else:
                assert weights is not None, f"expert {expert} of {self.prefix} was not read"
                source = list(read).index(expert)
                gate_up[slot], down[slot] = weights[0][source], weights[1][source]
        self.gate_up, self.down, self.slots = gate_up, down, tuple(slots)

    @property
    def draft(self) -> bool:
        return self.prefix.startswith(DRAFT_PREFIX)

    @property
    def expert_bytes(self) -> int:
        """Of the weights of one expert."""
        return 3 * self.shape.inner * self.shape.width * self.gate_up.element_size()


class Exchange(Protocol):
    """Computes a layer's experts with the other ranks of the group."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


@dataclass(slots=True)
class ExpertBank:
    """Filled while a network is built: `make` is its `make_experts`. Layers are numbered in the order of use."""

    rank: int
    placements: Mapping[str, Placement]
    """By prefix: what is read."""
    layers: list[LayerExperts] = field(default_factory=list)
    exchange: Exchange | None = None
    """Of the group that the rank is in."""

    def make(self, weights: Weights, shape: ExpertShape) -> RoutedExperts:
        own = self.placements[weights.prefix].ranks[self.rank]
        gate_up, down = stack_experts(weights, shape, own)
        self.layers.append(LayerExperts(weights.prefix, shape, gate_up, down, tuple(own)))
        return ParallelExperts(self, len(self.layers) - 1)

    def passes(self) -> dict[bool, range]:
        """The layers that a forward of the target (False) and of the drafter (True) uses."""
        target = sum(not layer.draft for layer in self.layers)
        return {False: range(target), True: range(target, len(self.layers))}


@dataclass(frozen=True, slots=True)
class ParallelExperts:
    """One layer's experts, wherever they are."""

    bank: ExpertBank
    layer: int

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, *, count: int) -> Tensor:
        assert self.bank.exchange is not None, "a forward outside of the group's step"
        real = self.bank.exchange(self.layer, x[:count], ids[:count], weights[:count])
        out = real.new_zeros(len(x), x.shape[1])
        out[:count] = real
        return out


def held_experts(placements: Mapping[str, Placement], rank: int) -> dict[str, Sequence[int]]:
    """What a rank must read, by prefix."""
    return {prefix: sorted(set(placement.ranks[rank])) for prefix, placement in placements.items()}
