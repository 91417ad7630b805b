from __future__ import annotations

import torch

from tests.engine.expert_parallel.group_world import WEIGHTS, RankSequences, alone, memory_group
from whalepod.engine.expert_parallel.balancing import utilisation
from whalepod.engine.expert_parallel.placement import even_placement
from whalepod.engine.expert_parallel.rebalancing import plan_rebalance


def test_moving_experts_in_mid_run_changes_no_bit() -> None:
    group = memory_group(4, redundant=4)
    ranks = RankSequences(group)
    ranks.step(dict.fromkeys(range(4), 8))
    before = [placement.ranks for placement in group.groups[0].placements]
    group.look_at_loads()
    ranks.finish(rows=1)
    after = [placement.ranks for placement in group.groups[0].placements]
    assert after != before
    assert all(rebalancer.rebalances == 1 for rebalancer in group.rebalancers)
    assert all(each.placements == group.groups[0].placements for each in group.groups)
    for rank, sequences in ranks.sequences.items():
        assert torch.equal(sequences.all_logits(0), alone(rank))
    group.close()


def test_every_rank_holds_the_weights_that_its_table_names() -> None:
    group = memory_group(4, redundant=4)
    ranks = RankSequences(group)
    ranks.step(dict.fromkeys(range(4), 8))
    group.look_at_loads()
    ranks.finish(rows=1)
    for rank, each in enumerate(group.groups):
        for layer, placement in zip(each.bank.layers, each.placements, strict=True):
            for slot, expert in enumerate(placement.ranks[rank]):
                assert torch.equal(layer.down[slot], WEIGHTS.tensors[f"{layer.prefix}experts.{expert}.w2.weight"])
    group.close()


def test_a_layer_whose_load_is_balanced_stays() -> None:
    even = even_placement(8, 4)
    skewed = [100, 90, 1, 1, 1, 1, 1, 1]
    planned = plan_rebalance([even, even], [[5] * 8, skewed], gain_min=0.02)
    assert list(planned) == [1]
    assert utilisation(planned[1], skewed) > utilisation(even, skewed)


def test_unknown_loads_and_uneven_slots_move_nothing() -> None:
    assert plan_rebalance([even_placement(8, 4)], [[0] * 8], gain_min=0.0) == {}
    assert plan_rebalance([even_placement(8, 3)], [[9, 1, 1, 1, 1, 1, 1, 1]], gain_min=0.0) == {}


def test_with_several_machines_an_experts_replicas_stay_within_one() -> None:
    old = even_placement(16, 8, redundant=8)
    load = [1000, 3, 400, 9, 5, 7, 2, 8, 6, 900, 4, 1, 300, 2, 3, 5]
    (new,) = plan_rebalance([old], [load], gain_min=0.02, nodes=2).values()
    for expert in range(16):
        machines = {rank // 4 for rank, slots in enumerate(new.ranks) if expert in slots}
        assert machines == {expert // 8}
    assert max(new.counts) > 2  # heavy experts have several, or this would show nothing
    assert all(len(slots) == len(set(slots)) for slots in new.ranks)
    assert utilisation(new, load) > utilisation(old, load) + 0.1
    globally = plan_rebalance([old], [load], gain_min=0.02)[0]
    assert any(len({rank // 4 for rank, slots in enumerate(globally.ranks) if e in slots}) > 1 for e in range(16))
