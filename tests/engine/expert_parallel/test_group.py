from __future__ import annotations

import pytest
import torch

from tests.engine.expert_parallel.group_world import RankSequences, alone, memory_group
from whalepod.engine.expert_parallel.group import Job
from whalepod.engine.expert_parallel.transport import GroupBrokenError


def assert_bits(ranks: RankSequences, *seeds: int) -> None:
    for seed in seeds:
        assert torch.equal(ranks.sequences[seed].all_logits(0), alone(seed)), f"rank {seed} differs"


@pytest.mark.parametrize("low_latency_rows", [0, 64], ids=["normal", "low_latency"])
@pytest.mark.parametrize(("size", "redundant"), [(2, 0), (4, 4)])
def test_a_group_computes_what_one_process_does_bit_for_bit(size: int, redundant: int, low_latency_rows: int) -> None:
    group = memory_group(size, redundant=redundant, low_latency_rows=low_latency_rows)
    ranks = RankSequences(group)
    ranks.step(dict.fromkeys(range(size), 9))
    ranks.finish(rows=1)
    assert_bits(ranks, *range(size))
    group.close()


def test_idle_ranks_take_part_and_unequal_batches_do_not_matter() -> None:
    group = memory_group(4)
    ranks = RankSequences(group, {1: 1, 3: 3})
    ranks.step({1: 13})
    ranks.step({1: 1, 3: 8})
    ranks.finish(rows=5)
    assert_bits(ranks, 1, 3)
    assert group.groups[0].statistics.dummy_passes == group.groups[0].statistics.passes > 0
    assert all(window.total.sum() == 0 for window in group.groups[0].windows)
    group.close()


def test_a_rank_whose_forward_fails_does_not_stop_the_others() -> None:
    def fail() -> None:
        raise ValueError("no such block")

    group = memory_group(2)
    ranks = RankSequences(group, {1: 1})
    with pytest.raises(ValueError, match="no such block"):
        group.round([Job(rows=4, call=fail), ranks._job(ranks.sequences[1], 4)])
    ranks.finish(rows=8)
    assert_bits(ranks, 1)
    group.close()


def test_a_closed_group_tells_who_waits_in_it() -> None:
    group = memory_group(2)
    group.groups[1].close()
    with pytest.raises(GroupBrokenError):
        group.groups[0].round(None)
    group.close()


def test_more_rows_than_agreed_are_an_error_and_never_cut() -> None:
    group = memory_group(2)
    ranks = RankSequences(group, {0: 0})
    job = ranks._job(ranks.sequences[0], 9)
    job.rows = 4
    with pytest.raises(AssertionError, match="agreed on 4"):
        group.round([job, None])
    group.close()
