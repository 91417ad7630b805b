"""Messages between ranks: the plain version against what it promises, Triton's against the plain one (interpreter)."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from whalepod.kernels.expert_messages import Inboxes, MessageLayout, reference, triton_kernel
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
    layout = MessageLayout(9, CHOSEN, 64, torch.float32, FP8_BLOCK32 if packed else None)
    messages, places = reference.pack(x, ids, TABLE, layout, source=1, size=SIZE)
    rows, slots = reference.unpack(messages, layout, absent=9)
    sent = x if packed is None else FP8_BLOCK32.round_trip(x)
    for row in range(7):
        for choice in range(CHOSEN):
            place, expert = int(places[row, choice]), int(ids[row, choice])
            replica = (row + 1) % 2 if expert == 0 else 0
            assert place // layout.pairs == RANKS[expert, replica]
            assert slots[place] == SLOTS[expert, replica]
            assert torch.equal(rows[place // CHOSEN], sent[row])
    assert (slots == 9).sum() == SIZE * layout.pairs - 7 * CHOSEN
    outputs = rows.repeat_interleave(CHOSEN, dim=0)
    summed = reference.gather_sum(outputs, places, weights)
    assert torch.equal(summed, combine_outputs(sent.unsqueeze(1).expand(-1, CHOSEN, -1), weights))


@pytest.mark.parametrize(("rows", "width", "room"), [(7, 64, 9), (0, 32, 1), (1, 1056, 1), (17, 96, 20)])
def test_triton_writes_and_reads_the_same(rows: int, width: int, room: int) -> None:
    x, ids, weights = drawn(rows, width)
    layout = MessageLayout(room, CHOSEN, width, torch.float32, FP8_BLOCK32)
    wanted, wanted_places = reference.pack(x, ids, TABLE, layout, source=2, size=SIZE)
    messages, places = triton_kernel.pack(x, ids, TABLE, layout, source=2, size=SIZE)
    assert torch.equal(places, wanted_places)
    assert_same_rows(messages, wanted, layout)
    outputs = torch.randn(SIZE * layout.pairs, width, generator=torch.Generator().manual_seed(1))
    summed = triton_kernel.gather_sum(outputs, places, weights)
    torch.testing.assert_close(summed, reference.gather_sum(outputs, places, weights), rtol=1e-6, atol=1e-6)


def assert_same_rows(messages: Tensor, wanted: Tensor, layout: MessageLayout) -> None:
    wanted_rows, wanted_slots = reference.unpack(wanted, layout, absent=9)
    rows, slots = triton_kernel.unpack(messages, layout, absent=9)
    assert torch.equal(slots, wanted_slots)
    there = (slots < 9).view(-1, CHOSEN).any(dim=1)
    assert torch.equal(rows[there], wanted_rows[there])


def test_what_ranks_write_to_each_others_memory_is_what_they_would_have_sent() -> None:
    count, width, room = (5, 0, 7), 96, 8
    layout = MessageLayout(room, CHOSEN, width, torch.float32, FP8_BLOCK32)
    outputs_start, total = Inboxes.room(layout, SIZE)
    memory = [torch.full((total,), 0x55, dtype=torch.uint8) for _ in range(SIZE)]
    addresses = torch.tensor([each.data_ptr() for each in memory])
    inboxes = [Inboxes(addresses, own, outputs_start) for own in memory]
    drawn_by = [drawn(rows, width) for rows in count]
    for source, (x, ids, _) in enumerate(drawn_by):
        triton_kernel.put_rows(x, ids, TABLE, layout, inboxes[source], source=source)
    packed = [
        reference.pack(x, ids, TABLE, layout, source=source, size=SIZE) for source, (x, ids, _) in enumerate(drawn_by)
    ]
    made: list[Tensor] = []
    for rank in range(SIZE):
        assert_same_rows(inboxes[rank].messages(layout), torch.stack([each[0][rank] for each in packed]), layout)
        _, slots = triton_kernel.unpack(inboxes[rank].messages(layout), layout, absent=9)
        made.append(torch.randn(SIZE * layout.pairs, width, generator=torch.Generator().manual_seed(rank)))
        triton_kernel.put_outputs(made[rank], slots, layout, inboxes[rank], absent=9)
    for source, (_, places) in enumerate(packed):
        back = torch.cat([outputs.view(SIZE, layout.pairs, width)[source] for outputs in made])
        assert torch.equal(inboxes[source].outputs(layout)[: places.numel()], back[places.flatten()])


def test_a_rank_that_meets_the_others_waits_until_all_have_come_as_far_or_it_is_told_to_stop() -> None:
    pads = torch.zeros(SIZE, SIZE, dtype=torch.int32)
    signals = torch.tensor([pad.data_ptr() for pad in pads])
    round_number, ended = torch.full((1,), 2**31 - 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    pads[1] = torch.tensor([-(2**31), 0, -(2**31) + 1])  # the next round, in numbers that wrap
    triton_kernel.meet(signals, pads[1], round_number, ended, rank=1)
    assert round_number.item() == -(2**31)
    assert pads[:, 1].tolist() == [-(2**31)] * SIZE
    ended.fill_(1)
    triton_kernel.meet(signals, pads[1], round_number, ended, rank=1)  # nobody comes
    assert pads[1, 1] == -(2**31) + 1


def test_triton_encodes_and_decodes_the_same() -> None:
    x, _, _ = drawn(5, 96)
    records = triton_kernel.encode(x)
    assert torch.equal(records, FP8_BLOCK32.encode(x))
    assert torch.equal(triton_kernel.decode(records, 96, torch.float32), FP8_BLOCK32.round_trip(x))
