"""How experts are replicated and packed onto ranks: the published EPLB algorithm (`model.md` §4.5, `runtime.md` §6.5).

Pure, and in integers and single divisions only: the ranks of a group compute the same plan from the same loads.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from whalepod.core.errors import ConfigError

from .placement import Placement


def pack_balanced(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Items into `packs` packs of equally many: heaviest first, into the lightest pack that has room.

    Ties go to the lower item and the lower pack. Raises ValueError if the items do not divide.
    """
    if len(weights) % packs:
        raise ValueError(f"{len(weights)} items do not fill {packs} packs equally")
    room = len(weights) // packs
    if room == 1:
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    lightest = [(0.0, pack) for pack in range(packs)]
    for item in sorted(range(len(weights)), key=lambda item: (-weights[item], item)):
        weight, pack = heapq.heappop(lightest)
        packed[pack].append(item)
        if len(packed[pack]) < room:
            heapq.heappush(lightest, (weight + weights[item], pack))
    return packed


def replicate(loads: Sequence[float], slots: int) -> list[int]:
    """How many slots each expert gets: one, and each further one to whoever has the most load a slot.

    Ties go to the lower expert. Raises ValueError if there are fewer slots than experts.
    """
    if slots < len(loads):
        raise ValueError(f"{slots} slots do not hold {len(loads)} experts")
    counts = [1] * len(loads)
    heaviest = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heaviest)
    for _ in range(slots - len(loads)):
        _, expert = heaviest[0]
        counts[expert] += 1
        heapq.heapreplace(heaviest, (-loads[expert] / counts[expert], expert))
    return counts


def balance_global(loads: Sequence[float], *, slots: int, ranks: int) -> Placement:
    """Replicate over all slots, then pack slots to ranks. `loads` [experts]: rows routed to each."""
    experts, weights = _replicas(range(len(loads)), loads, slots)
    packed = pack_balanced(weights, ranks)
    return Placement(len(loads), tuple(tuple(experts[slot] for slot in pack) for pack in packed))


def balance_hierarchical(
    loads: Sequence[float], *, slots: int, ranks: int, nodes: int, groups: int | None = None
) -> Placement:
    """Groups of consecutive experts to nodes, then replicas and ranks within each node: a group never leaves its node.

    `groups` defaults to `nodes`. Raises ConfigError if sizes do not divide.
    """
    groups = nodes if groups is None else groups
    for what, count, by in (("experts", len(loads), groups), ("groups", groups, nodes), ("slots", slots, ranks)):
        if count % by:
            raise ConfigError(f"{count} {what} do not divide by {by}")
    if ranks % nodes:
        raise ConfigError(f"{ranks} ranks do not divide over {nodes} nodes")
    per_group = len(loads) // groups
    members = [range(group * per_group, (group + 1) * per_group) for group in range(groups)]
    placed: list[tuple[int, ...]] = []
    for pack in pack_balanced([sum(loads[expert] for expert in member) for member in members], nodes):
        own = [expert for group in sorted(pack) for expert in members[group]]
        experts, weights = _replicas(own, [loads[expert] for expert in own], slots // nodes)
        placed += [tuple(experts[slot] for slot in rank) for rank in pack_balanced(weights, ranks // nodes)]
    return Placement(len(loads), tuple(placed))


def _replicas(names: Sequence[int], loads: Sequence[float], slots: int) -> tuple[list[int], list[float]]:
    """Expert and load of each slot, an expert's slots side by side."""
    counts = replicate(loads, slots)
    experts = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    weights = [load / count for load, count in zip(loads, counts, strict=True) for _ in range(count)]
    return experts, weights


def spread_replicas(placement: Placement, loads: Sequence[float], *, nodes: int = 1) -> Placement:
    """Two slots of one expert on one rank waste one: swap it with a slot of another rank of the same node where the
    heaviest of the two ranks does not get heavier."""
    ranks = [list(slots) for slots in placement.ranks]
    each = [load / count for load, count in zip(loads, placement.counts, strict=True)]
    totals = [sum(each[expert] for expert in slots) for slots in ranks]
    per_node = len(ranks) // nodes
    for here, slots in enumerate(ranks):
        first = here // per_node * per_node
        for slot, expert in enumerate(slots):
            if expert not in slots[:slot]:
                continue
            for there in range(first, first + per_node):
                other = _swap_partner(expert, slots, ranks[there], each, totals[here], totals[there])
                if there != here and other is not None:
                    moved = each[ranks[there][other]] - each[expert]
                    slots[slot], ranks[there][other] = ranks[there][other], expert
                    totals[here] += moved
                    totals[there] -= moved
                    break
    return Placement(placement.experts, tuple(tuple(slots) for slots in ranks))


def _swap_partner(
    expert: int, own: Sequence[int], others: Sequence[int], each: Sequence[float], total: float, other_total: float
) -> int | None:
    if expert in others:
        return None
    limit = max(total, other_total)
    for slot, other in enumerate(others):
        moved = each[other] - each[expert]
        if other not in own and max(total + moved, other_total - moved) <= limit:
            return slot
    return None


def keep_places(new: Placement, old: Placement, *, nodes: int = 1) -> Placement:
    """`new` with its nodes, and within them its packs, dealt to those that hold most of them already, and experts that
    stay on their rank in their slot: few moves are left. Both have equally many ranks and slots."""
    new_nodes, old_nodes = _by_node(new, nodes), _by_node(old, nodes)
    ranks: list[tuple[int, ...]] = []
    for node, dealt in enumerate(_deal([sum(n, ()) for n in new_nodes], [sum(n, ()) for n in old_nodes])):
        packs = new_nodes[dealt]
        own = _deal(packs, old_nodes[node])
        ranks += [_keep_slots(packs[pack], held) for pack, held in zip(own, old_nodes[node], strict=True)]
    return Placement(new.experts, tuple(ranks))


def _by_node(placement: Placement, nodes: int) -> list[list[tuple[int, ...]]]:
    each = len(placement.ranks) // nodes
    return [list(placement.ranks[node * each : (node + 1) * each]) for node in range(nodes)]


def _deal(packs: Sequence[Sequence[int]], holders: Sequence[Sequence[int]]) -> list[int]:
    """The pack that each holder gets: first who shares most with one."""
    free_packs, free_holders = set(range(len(packs))), set(range(len(holders)))
    dealt: dict[int, int] = {}
    for _, holder, pack in sorted(
        (-_shared(packs[pack], holders[holder]), holder, pack) for pack in free_packs for holder in free_holders
    ):
        if holder in free_holders and pack in free_packs:
            free_holders.remove(holder)
            free_packs.remove(pack)
            dealt[holder] = pack
    return [dealt[holder] for holder in range(len(holders))]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    rest = list(b)
    count = 0
    for expert in a:
        if expert in rest:
            rest.remove(expert)
            count += 1
    return count


def _keep_slots(new: Sequence[int], old: Sequence[int]) -> tuple[int, ...]:
    waiting = list(new)
    slots: list[int | None] = [None] * len(old)
    for slot, expert in enumerate(old):
        if expert in waiting:
            waiting.remove(expert)
            slots[slot] = expert
    return tuple(waiting.pop(0) if expert is None else expert for expert in slots)


def utilisation(placement: Placement, loads: Sequence[float]) -> float:
    """Mean over maximum of the ranks' loads, if an expert's rows spread equally over its slots. 1 without load."""
    counts = placement.counts
    totals = [sum(loads[expert] / counts[expert] for expert in slots) for slots in placement.ranks]
    heaviest = max(totals)
    return sum(totals) / len(totals) / heaviest if heaviest > 0 else 1.0
