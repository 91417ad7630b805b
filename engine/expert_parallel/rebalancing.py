"""EPLB at work: new placements from the loads of a window, and experts that move to their new slots while steps go on.

    loads of all ranks ─▶ plan (the same on every rank) ─▶ a thread of each rank sends and receives, layer by layer
      ─▶ each rank votes how many layers it has staged ─▶ between two steps all swap the layers that everybody has

A layer's swap changes weights and table together, on every rank at the same round, so no result depends on it. If
moving fails, what is not swapped stays where it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .balancing import balance_global, balance_hierarchical, keep_places, spread_replicas, utilisation
from .dispatch import raw_bytes
from .expert_bank import LayerExperts
from .group import Agreement, ExpertGroup
from .placement import Placement
from .transport import GroupBrokenError, Transport

log = logging.getLogger(__name__)

FAILED = -1


@dataclass(frozen=True, slots=True)
class RebalanceOptions:
    interval_steps: int = 3000
    """Rounds with work between two looks at the loads; 0: never."""
    gain_min: float = 0.02
    """Utilisation that a layer must gain to be moved."""
    nodes: int = 1
    """Machines that the ranks of a complete group lie on, equally many on each, in their order. Above 1, balancing is
    hierarchical: replicas of an expert stay within one machine."""


def plan_rebalance(
    placements: Sequence[Placement], loads: Sequence[Sequence[int]], *, gain_min: float, nodes: int = 1
) -> dict[int, Placement]:
    """New placements, by layer, where they promise enough. Ranks keep their numbers of slots."""
    planned: dict[int, Placement] = {}
    for layer, (old, load) in enumerate(zip(placements, loads, strict=True)):
        ranks, slots = len(old.ranks), len(old.physical_to_logical)
        if not any(load) or slots % ranks or ranks % nodes or any(len(own) * ranks != slots for own in old.ranks):
            continue  # nothing is known, or the group has just lost a rank and its slots are uneven
        if nodes == 1:
            new = balance_global(load, slots=slots, ranks=ranks)
        else:
            new = balance_hierarchical(load, slots=slots, ranks=ranks, nodes=nodes)
        new = spread_replicas(new, load, nodes=nodes)
        if utilisation(new, load) >= utilisation(old, load) + gain_min:
            planned[layer] = keep_places(new, old, nodes=nodes)
    return planned


class Move:
    """Moves the experts of some layers to new slots, on a thread of its own, over a transport of its own."""

    def __init__(
        self, transport: Transport, layers: Sequence[LayerExperts], old: Sequence[Placement], new: dict[int, Placement]
    ) -> None:
        self._transport = transport
        self._layers = layers
        self._old = old
        self._new = new
        self.order = sorted(new)
        self._staged: list[tuple[Tensor, Tensor]] = []
        self._failed = False
        self.swapped = 0
        self.moved_experts = 0
        self._thread = threading.Thread(target=self._run, name="expert-mover", daemon=True)
        self._thread.start()

    @property
    def staged_layers(self) -> int:
        """For this rank's vote."""
        return FAILED if self._failed else len(self._staged)

    @property
    def done(self) -> bool:
        return self.swapped == len(self.order)

    def swap(self, group: ExpertGroup, agreement: Agreement) -> bool:
        """Put what every rank has into use. False: moving failed somewhere, forget it."""
        if agreement.staged_layers == FAILED:
            return False
        while self.swapped < agreement.staged_layers:
            layer = self.order[self.swapped]
            experts = group.bank.layers[layer]
            experts.gate_up, experts.down = self._staged[self.swapped]
            experts.slots = self._new[layer].ranks[group.transport.rank]
            group.placements[layer] = self._new[layer]
            self.swapped += 1
        return True

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            for layer in self.order:
                self._staged.append(self._move(self._layers[layer], self._old[layer], self._new[layer]))
        except GroupBrokenError:
            self._failed = True
        except Exception:
            log.exception("experts could not be moved")
            self._failed = True

    def _move(self, experts: LayerExperts, old: Placement, new: Placement) -> tuple[Tensor, Tensor]:
        """The layer's stacks on this rank as the new placement wants them."""
        rank, size = self._transport.rank, self._transport.size
        sources = [_sources(old, new, receiver) for receiver in range(size)]
        sent: list[Tensor] = []
        for receiver in range(size):
            for _, (sender, slot) in sources[receiver]:
                if sender == rank and receiver != rank:
                    sent += [raw_bytes(experts.gate_up[slot]), raw_bytes(experts.down[slot])]
        each = experts.expert_bytes
        sent_bytes = [
            0 if receiver == rank else each * sum(sender == rank for _, (sender, _) in sources[receiver])
            for receiver in range(size)
        ]
        wanted = [(slot, place) for slot, place in sources[rank] if place[0] != rank]
        received_bytes = [each * sum(place[0] == sender for _, place in wanted) for sender in range(size)]
        message = torch.cat(sent) if sent else torch.zeros(0, dtype=torch.uint8, device=experts.down.device)
        received = self._transport.exchange(message, sent_bytes, received_bytes)
        return self._assemble(experts, sources[rank], wanted, received)

    def _assemble(
        self,
        experts: LayerExperts,
        sources: Sequence[tuple[int, tuple[int, int]]],
        wanted: Sequence[tuple[int, tuple[int, int]]],
        received: Tensor,
    ) -> tuple[Tensor, Tensor]:
        gate_up = experts.gate_up.new_empty(len(sources), *experts.gate_up.shape[1:])
        down = experts.down.new_empty(len(sources), *experts.down.shape[1:])
        for slot, (sender, source) in sources:
            if sender == self._transport.rank:
                gate_up[slot], down[slot] = experts.gate_up[source], experts.down[source]
        each, first = experts.expert_bytes, experts.expert_bytes // 3 * 2
        # Messages lie by sender, and within one by the receiver's slots.
        for number, (slot, _) in enumerate(sorted(wanted, key=lambda entry: entry[1][0])):
            part = received[number * each : (number + 1) * each].clone()
            gate_up[slot] = part[:first].view(gate_up.dtype).view(gate_up.shape[1:])
            down[slot] = part[first:].view(down.dtype).view(down.shape[1:])
            self.moved_experts += 1
        return gate_up, down


def _sources(old: Placement, new: Placement, receiver: int) -> list[tuple[int, tuple[int, int]]]:
    """For each slot of a rank in the new placement: which rank's old slot its expert comes from, its own if it can."""
    found: list[tuple[int, tuple[int, int]]] = []
    for slot, expert in enumerate(new.ranks[receiver]):
        places = old.places[expert]
        own = next((place for place in places if place[0] == receiver), None)
        found.append((slot, own or places[(receiver + slot) % len(places)]))
    return found


class Rebalancer:
    """Looks at the loads now and then, and moves experts. For the thread of the group's rounds."""

    def __init__(self, group: ExpertGroup, mover: Transport, *, options: RebalanceOptions) -> None:
        """`mover`: a transport between the same ranks, used beside the group's own."""
        self._group = group
        self._mover = mover
        self._options = options
        self._steps = 0
        self._move: Move | None = None
        self.rebalances = 0
        """Moves that were completed."""
        self.balancedness = 1.0
        """Mean over maximum of the ranks' loads, over the layers, when they were last looked at."""

    @property
    def staged_layers(self) -> int:
        return 0 if self._move is None else self._move.staged_layers

    def after(self, agreement: Agreement) -> None:
        """Between two steps. Raises GroupBrokenError."""
        if self._move is not None:
            failed = not self._move.swap(self._group, agreement)
            if failed or self._move.done:
                self.rebalances += not failed
                self._move = None
            return
        self._steps += not agreement.idle
        if self._options.interval_steps and self._steps >= self._options.interval_steps:
            self._steps = 0
            self.look()

    def look(self) -> None:
        """Gather the loads of all ranks, and begin to move if that helps. Every rank at the same round."""
        group = self._group
        own = torch.cat([window.total.cpu() for window in group.windows])
        total = group.transport.gather(own).sum(dim=0).numpy()
        bounds = np.cumsum([len(window.total) for window in group.windows])[:-1]
        loads = [part.tolist() for part in np.split(total, bounds)]
        known = [utilisation(p, load) for p, load in zip(group.placements, loads, strict=True) if any(load)]
        self.balancedness = sum(known) / len(known) if known else 1.0
        planned = plan_rebalance(group.placements, loads, gain_min=self._options.gain_min, nodes=self._options.nodes)
        if planned:
            self._move = Move(self._mover, list(group.bank.layers), list(group.placements), planned)

    def close_transport(self) -> None:
        """Make a move that is under way fail. From any thread."""
        self._mover.close()

    def close(self) -> None:
        """Give up a move that is under way."""
        self.close_transport()
        if self._move is not None:
            self._move.join()
            self._move = None
