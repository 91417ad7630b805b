"""Messages between ranks: the plain version against what it promises, Triton's against the plain one (interpreter)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.expert_messages import MessageLayout, reference, triton_kernel
from whalepod.kernels.experts import combine_outputs
from whalepod.kernels.quantise import FP8_BLOCK32

EXPERTS, SIZE, CHOSEN = 5, 3, 2
# Expert 0 has replicas on ranks 0 and 2; the others one each.
RANKS = torch.tensor([[0, 2], [0, -1], [1, -1], [1, -1], [2, -1]])
SLOTS = torch.tensor([[0, 1], [1, -1], [0, -1], [1, -1], [0, -1]])
TABLE = RANKS, SLOTS, torch.tensor([2, 1, 1, 1, 1])


def drawn(rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator) * 10
    ids = torch.rand(rows, EXPERTS, generator=generator).argsort(dim=1)[:, :CHOSEN]
    return x, ids, torch.rand(rows, CHOSEN, generator=generator)


@pytest.mark.parametrize("packed", [None, FP8_BLOCK32])
def test_every_pair_arrives_at_a_replica_and_its_output_comes_back(packed: object) -> None:
    x, ids, weights = drawn(7, 64)
    layout = MessageLayout(7 * CHOSEN, 64, torch.float32, FP8_BLOCK32 if packed else None)
    messages, places = reference.pack(x, ids, TABLE, layout, source=1, size=SIZE)
    rows, slots = reference.unpack(messages, layout, absent=9)
    sent = x if packed is None else FP8_BLOCK32.round_trip(x)
    for row in range(7):
        for choice in range(CHOSEN):
            place, expert = int(places[row, choice]), int(ids[row, choice])
            replica = (row + 1) % 2 if expert == 0 else 0
            assert place // layout.places == RANKS[expert, replica]
            assert slots[place] == SLOTS[expert, replica]
            assert torch.equal(rows[place], sent[row])
    assert (slots == 9).sum() == SIZE * layout.places - 7 * CHOSEN
    summed = reference.gather_sum(rows, places, weights)
    assert torch.equal(summed, combine_outputs(sent.unsqueeze(1).expand(-1, CHOSEN, -1), weights))


@pytest.mark.parametrize(("rows", "width", "room"), [(7, 64, 9), (0, 32, 1), (1, 1056, 1), (33, 96, 40)])
def test_triton_writes_and_reads_the_same(rows: int, width: int, room: int) -> None:
    x, ids, weights = drawn(rows, width)
    layout = MessageLayout(room * CHOSEN, width, torch.float32, FP8_BLOCK32)
    wanted, wanted_places = reference.pack(x, ids, TABLE, layout, source=2, size=SIZE)
    messages, places = triton_kernel.pack(x, ids, TABLE, layout, source=2, size=SIZE)
    assert torch.equal(places, wanted_places)
    wanted_rows, wanted_slots = reference.unpack(wanted, layout, absent=9)
    ours, slots = triton_kernel.unpack(messages, layout, absent=9)
    assert torch.equal(slots, wanted_slots)
    assert torch.equal(ours[slots < 9], wanted_rows[slots < 9])
    summed = triton_kernel.gather_sum(wanted_rows, places, weights)
    torch.testing.assert_close(summed, reference.gather_sum(wanted_rows, places, weights), rtol=1e-6, atol=1e-6)


def test_triton_encodes_and_decodes_the_same() -> None:
    x, _, _ = drawn(5, 96)
    records = triton_kernel.encode(x)
    assert torch.equal(records, FP8_BLOCK32.encode(x))
    assert torch.equal(triton_kernel.decode(records, 96, torch.float32), FP8_BLOCK32.round_trip(x))
