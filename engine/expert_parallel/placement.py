"""Which rank holds which expert of one layer. A *slot* is room for one expert; an expert in several slots is
replicated. Physical slot p lies on rank p // slots per rank where ranks have equally many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Placement:
    """Raises ValueError unless every expert has a slot."""

    experts: int
    """Logical experts of the layer."""
    ranks: tuple[tuple[int, ...], ...]
    """The expert in each slot of each rank. Ranks may have different numbers of slots."""

    def __post_init__(self) -> None:
        held = {expert for slots in self.ranks for expert in slots}
        missing = sorted(set(range(self.experts)) - held)
        if missing or held - set(range(self.experts)):
            raise ValueError(f"a placement of {self.experts} experts lacks {missing[:10]}")

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Slots of each expert."""
        counts = [0] * self.experts
        for slots in self.ranks:
            for expert in slots:
                counts[expert] += 1
        return tuple(counts)

    @cached_property
    def physical_to_logical(self) -> Ints:
        """[slots] the expert in each physical slot, rank by rank."""
        return np.array([expert for slots in self.ranks for expert in slots], dtype=np.int64)

    @cached_property
    def places(self) -> list[list[tuple[int, int]]]:
        """(rank, slot on it) of every replica of each expert, in the order of ranks."""
        places: list[list[tuple[int, int]]] = [[] for _ in range(self.experts)]
        for rank, slots in enumerate(self.ranks):
            for slot, expert in enumerate(slots):
                places[expert].append((rank, slot))
        return places

    @cached_property
    def replica_table(self) -> tuple[Ints, Ints, Ints]:
        """Rank and slot [experts, replicas max], padded with -1, and the number of replicas [experts]."""
        width = max(self.counts)
        ranks = np.full((self.experts, width), -1, dtype=np.int64)
        slots = np.full((self.experts, width), -1, dtype=np.int64)
        for expert, replicas in enumerate(self.places):
            for number, (rank, slot) in enumerate(replicas):
                ranks[expert, number], slots[expert, number] = rank, slot
        return ranks, slots, np.array(self.counts, dtype=np.int64)

    def choose(self, experts: Tensor, *, source: int) -> tuple[Tensor, Tensor]:
        """Where the pairs go that rank `source` sends out, `experts` [rows, chosen] int64: rank and slot, [rows,
        chosen] int64.

        Static and cheap: a row's number and its source walk over an expert's replicas.
        """
        ranks, slots, counts = self.table_on(experts.device)
        rows = torch.arange(len(experts), device=experts.device).unsqueeze(1) + source
        replica = rows % counts[experts]
        return ranks[experts, replica], slots[experts, replica]

    def table_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`replica_table` as tensors."""
        if device not in self._tables:
            ranks, slots, counts = (torch.from_numpy(part).to(device) for part in self.replica_table)
            self._tables[device] = ranks, slots, counts
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, tuple[Tensor, Tensor, Tensor]]:
        return {}


def even_placement(experts: int, ranks: int, *, redundant: int = 0) -> Placement:
    """Experts in order, `redundant` further slots for the first ones, as equally as it goes: no load is known yet."""
    order = [slot % experts for slot in range(experts + redundant)]
    bounds = [len(order) * rank // ranks for rank in range(ranks + 1)]
    return Placement(experts, tuple(tuple(order[bounds[rank] : bounds[rank + 1]]) for rank in range(ranks)))


def replace_lost(experts: int, held: Sequence[Sequence[int]], *, capacity: int) -> Placement:
    """A placement for ranks that hold something already, `held` (expert in each slot): nobody gives up an expert that
    no other rank holds, and what nobody holds goes first where a redundant slot is, then to whoever has the fewest.

    Slots are kept where they are. Ranks above `capacity` slots give up what others hold too; a rank takes more than
    `capacity` only if the experts would not fit otherwise.
    """
    slots = [list(own) for own in held]
    counts = [0] * experts
    for own in slots:
        for expert in own:
            counts[expert] += 1
    for own in sorted(slots, key=len, reverse=True):
        while len(own) > capacity:
            spare = next((i for i in reversed(range(len(own))) if counts[own[i]] > 1), None)
            if spare is None:
                break
            counts[own.pop(spare)] -= 1
    for expert in range(experts):
        if counts[expert] == 0:
            _take_in(expert, slots, counts, capacity)
            counts[expert] = 1
    return Placement(experts, tuple(tuple(own) for own in slots))


def _take_in(expert: int, slots: list[list[int]], counts: list[int], capacity: int) -> None:
    rank = min(range(len(slots)), key=lambda rank: (len(slots[rank]), rank))
    if len(slots[rank]) < capacity:
        slots[rank].append(expert)
        return
    most = max(range(len(counts)), key=lambda other: (counts[other], -other))
    if counts[most] > 1:
        own = max((own for own in slots if most in own), key=lambda own: sum(counts[e] > 1 for e in own))
        own[own.index(most)] = expert
        counts[most] -= 1
    else:
        slots[rank].append(expert)
