from __future__ import annotations

import itertools
import random

import pytest

from whalepod.core.errors import ConfigError
from whalepod.engine.expert_parallel.balancing import (
    balance_global,
    balance_hierarchical,
    keep_places,
    pack_balanced,
    replicate,
    spread_replicas,
    utilisation,
)
from whalepod.engine.expert_parallel.placement import Placement, even_placement


def zipf(experts: int = 384, *, seed: int = 0) -> list[float]:
    loads = [1.0 / (rank + 1) for rank in range(experts)]
    random.Random(seed).shuffle(loads)
    return loads


def random_loads(experts: int, *, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [float(generator.randint(0, 1000)) for _ in range(experts)]


@pytest.mark.parametrize(("ranks", "slots", "published"), [(64, 448, 0.987), (128, 512, 0.953), (4, 384, 0.990)])
def test_a_permuted_zipf_load_balances_as_published(ranks: int, slots: int, published: float) -> None:
    loads = zipf()
    assert utilisation(balance_global(loads, slots=slots, ranks=ranks), loads) == pytest.approx(published, abs=0.01)


def test_without_redundant_slots_no_placement_helps_a_wide_group() -> None:
    loads = zipf()
    bound = sum(loads) / 64 / max(loads)  # one rank holds the heaviest expert, whatever else it holds
    reached = utilisation(balance_global(loads, slots=384, ranks=64), loads)
    assert 0.98 * bound < reached <= bound
    assert reached == pytest.approx(0.10, abs=0.005)


def test_uniform_loads_are_balanced_exactly() -> None:
    assert utilisation(balance_global([7.0] * 384, slots=384, ranks=64), [7.0] * 384) == 1.0


def test_every_rank_has_as_many_slots_and_every_expert_one() -> None:
    for seed in range(20):
        placement = balance_global(random_loads(48, seed=seed), slots=64, ranks=8)
        assert {len(slots) for slots in placement.ranks} == {8}
        assert min(placement.counts) >= 1
        assert sum(placement.counts) == 64


def test_packing_is_never_worse_than_the_order_of_experts() -> None:
    for seed in range(20):
        loads = random_loads(64, seed=seed)
        assert utilisation(balance_global(loads, slots=64, ranks=8), loads) >= utilisation(even_placement(64, 8), loads)


def test_packing_comes_close_to_the_best_there_is() -> None:
    for seed in range(10):
        loads = random_loads(8, seed=seed)
        best = min(
            max(sum(loads[item] for item in pair), sum(loads) - sum(loads[item] for item in pair))
            for pair in itertools.combinations(range(8), 4)
        )
        packed = pack_balanced(loads, 2)
        assert max(sum(loads[item] for item in pack) for pack in packed) <= best * 7 / 6


def test_ties_go_to_the_lower_expert_and_the_lower_pack() -> None:
    assert replicate([1.0, 1.0, 1.0], 5) == [2, 2, 1]
    assert pack_balanced([1.0] * 4, 2) == [[0, 2], [1, 3]]


def test_one_item_a_pack_stays_where_it_is() -> None:
    assert pack_balanced([1.0, 5.0, 3.0], 3) == [[0], [1], [2]]


def test_a_group_of_experts_stays_on_one_node() -> None:
    loads = random_loads(32, seed=3)
    placement = balance_hierarchical(loads, slots=48, ranks=8, nodes=2, groups=4)
    nodes = [{expert // 8 for slots in placement.ranks[start : start + 4] for expert in slots} for start in (0, 4)]
    assert nodes[0].isdisjoint(nodes[1])
    assert nodes[0] | nodes[1] == {0, 1, 2, 3}


def test_hierarchical_with_one_node_is_global() -> None:
    loads = random_loads(32, seed=4)
    assert balance_hierarchical(loads, slots=40, ranks=8, nodes=1) == balance_global(loads, slots=40, ranks=8)


def test_sizes_that_do_not_divide_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="30 experts do not divide by 4"):
        balance_hierarchical([1.0] * 30, slots=32, ranks=8, nodes=4)
    with pytest.raises(ValueError, match="7 items"):
        balance_global([1.0] * 7, slots=7, ranks=2)


def test_the_same_loads_give_the_same_placement_and_nothing_moves() -> None:
    loads = random_loads(64, seed=5)
    first = balance_global(loads, slots=80, ranks=8)
    assert keep_places(balance_global(loads, slots=80, ranks=8), first) == first


def test_keeping_places_moves_only_what_must_move() -> None:
    old = Placement(6, ((0, 1, 2), (3, 4, 5)))
    new = Placement(6, ((5, 4, 0), (1, 3, 2)))
    assert keep_places(new, old).ranks == ((3, 1, 2), (0, 4, 5))


def test_replicas_of_one_expert_are_spread_where_that_costs_nothing() -> None:
    loads = [8.0, 4.0, 4.0, 4.0, 4.0]
    doubled = Placement(5, ((0, 0, 1), (2, 3, 4)))
    spread = spread_replicas(doubled, loads)
    assert [slots.count(0) for slots in spread.ranks] == [1, 1]
    assert utilisation(spread, loads) >= utilisation(doubled, loads)
