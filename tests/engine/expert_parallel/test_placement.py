from __future__ import annotations

import pytest
import torch

from whalepod.engine.expert_parallel.placement import Placement, even_placement, replace_lost


def test_every_replica_of_an_expert_takes_its_share_of_the_rows() -> None:
    placement = Placement(3, ((0, 1), (0, 2), (0, 1)))
    ranks, slots = placement.choose(torch.zeros((9, 1), dtype=torch.int64), source=1)
    assert torch.bincount(ranks[:, 0]).tolist() == [3, 3, 3]
    assert {(int(rank), int(slot)) for rank, slot in zip(ranks[:, 0], slots[:, 0], strict=True)} == {
        (0, 0),
        (1, 0),
        (2, 0),
    }


def test_an_expert_without_a_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks \\[2\\]"):
        Placement(3, ((0, 1), (1, 0)))


def test_experts_that_do_not_divide_are_dealt_as_equally_as_it_goes() -> None:
    assert sorted(len(slots) for slots in even_placement(16, 7).ranks) == [2, 2, 2, 2, 2, 3, 3]
    assert [len(slots) for slots in even_placement(384, 64, redundant=64).ranks] == [7] * 64


def test_a_lost_expert_takes_a_redundant_slot_first() -> None:
    old = even_placement(8, 4, redundant=4)  # 0 … 7, then 0 … 3 once more
    survivors = [slots for rank, slots in enumerate(old.ranks) if rank != 1]
    new = replace_lost(8, survivors, capacity=3)
    assert [len(slots) for slots in new.ranks] == [3, 3, 3]
    moved = sum(
        a != b
        for old_slots, slots in zip(survivors, new.ranks, strict=True)
        for a, b in zip(old_slots, slots, strict=True)
    )
    lost = set(old.ranks[1]) - {expert for slots in survivors for expert in slots}
    assert moved == len(lost) > 0


def test_without_a_redundant_slot_survivors_make_room() -> None:
    new = replace_lost(8, [(0, 1), (4, 5), (6, 7)], capacity=2)
    assert sorted(len(slots) for slots in new.ranks) == [2, 3, 3]
    assert new.ranks[0][:2] == (0, 1)


def test_a_rank_that_comes_back_takes_the_load_off_the_others() -> None:
    crowded = replace_lost(8, [(0, 1), (4, 5), (6, 7)], capacity=2)
    healed = replace_lost(8, [crowded.ranks[0], (2, 3), *crowded.ranks[1:]], capacity=2)
    assert [set(slots) for slots in healed.ranks] == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
