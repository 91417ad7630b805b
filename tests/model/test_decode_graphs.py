"""A plan that is padded to a shape computes what the plan without padding does: what a graph replays. Recording itself
needs a GPU (`test_network_on_gpu.py`)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.model.network_world import CHECKPOINT, Sequences, random_prompt
from tests.model.test_packed_attention import state
from whalepod.model.batch_plan import BatchPlan
from whalepod.model.decode_graphs import DecodeGraphs, batch_sizes, shape_of
from whalepod.model.network import Network
from whalepod.model.packed_plan import PlanShape
from whalepod.model.record_formats import RELEASE_FORMATS


@pytest.fixture(scope="module")
def network() -> Network:
    return Network.load(CHECKPOINT, packed=True)


def prepared(network: Network) -> Sequences:
    run = Sequences(network, [random_prompt(90, seed=1), random_prompt(70, seed=2), random_prompt(40, seed=3)],
                    RELEASE_FORMATS)  # fmt: skip
    run.step({0: 75, 1: 41, 2: 12})
    return run


@pytest.mark.parametrize("rows", [{0: 1, 1: 1, 2: 1}, {0: 6, 1: 1, 2: 4}, {1: 6}], ids=["decode", "verify", "one"])
def test_padded_plans_compute_the_same(network: Network, rows: Mapping[int, int]) -> None:
    exact, padded = prepared(network), prepared(network)
    segments = [exact.segment(index, exact.done[index], exact.done[index] + count) for index, count in rows.items()]
    wanted = network.forward(segments, exact.caches)
    shape = shape_of(segments, block_tokens=16)
    assert shape is not None
    plan = BatchPlan.on_host(segments, network.config, padded.caches, packed=True, shape=shape)
    memories = network.memories(segments, padded=shape.rows)
    ours = network.logits(network.run(network.begin_planned(plan, padded.caches, text=None, memories=memories)))
    assert len(ours) == shape.rows
    torch.testing.assert_close(ours[: len(wanted)], wanted, atol=1e-6, rtol=0)
    for name, pool in state(exact.caches).items():
        assert torch.equal(state(padded.caches)[name], pool), name


def test_shapes_are_few_and_hold_what_they_are_for(network: Network) -> None:
    run = prepared(network)
    one_each = [run.segment(index, 10, 11) for index in range(3)]
    assert shape_of(one_each, block_tokens=16) == PlanShape(rows=4, segments=4, tokens=1024, group_rows=1)
    two = [run.segment(index, 10, 12) for index in range(3)]
    assert shape_of(two, block_tokens=16) == PlanShape(rows=8, segments=4, tokens=1024, group_rows=2)
    # Every segment of the shape is one, so no row need be padding.
    assert shape_of(two[:2], block_tokens=16) == PlanShape(rows=4, segments=2, tokens=1024, group_rows=2)
    assert shape_of(one_each * 600, block_tokens=16) is None


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_few_batches_have_every_shape_that_up_to_so_many_have(network: Network, rows: int) -> None:
    segment = prepared(network).segment(0, 10, 10 + rows)

    def shape(sequences: int) -> PlanShape | None:
        return shape_of([segment] * sequences, block_tokens=16)

    sizes = batch_sizes(300, rows=rows)
    assert sizes == sorted(sizes, reverse=True)
    shapes = [shape(size) for size in sizes]
    assert len(set(shapes)) == len(shapes)
    assert {shape(sequences) for sequences in range(1, 301)} - {None} == set(shapes)
    assert batch_sizes(1, rows=rows) == [1]


def test_only_packed_networks_on_a_gpu_are_recorded(network: Network) -> None:
    assert not DecodeGraphs.can_hold(network, prepared(network).caches)
