"""The kernels on a GPU at the released model's sizes, against the plain versions there. Skipped without a GPU; run in a
process of its own, because the other tests switch Triton's interpreter on."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.kernels.gpu_tensors import BF16, HIDDEN, KEY_WIDTH, angles, assert_close, bf16, draw
from whalepod.engine.expert_parallel.placement import even_placement
from whalepod.kernels import sampling
from whalepod.kernels.candidates import candidate_blocks, candidate_scores, entry_places
from whalepod.kernels.candidates import reference as candidates_reference
from whalepod.kernels.engram_gate import let_in
from whalepod.kernels.engram_gate import reference as gate_reference
from whalepod.kernels.expert_messages import (
    Inboxes,
    MessageLayout,
    gather_sum,
    meet,
    pack,
    put_outputs,
    put_rows,
    unpack,
)
from whalepod.kernels.expert_messages import reference as messages_reference
from whalepod.kernels.experts import combine_outputs, dense_expert, expert_outputs, routed_experts
from whalepod.kernels.experts import reference as experts_reference
from whalepod.kernels.experts.triton_kernel import swiglu
from whalepod.kernels.index_queries import index_queries
from whalepod.kernels.index_queries import reference as queries_reference
from whalepod.kernels.indexer import candidate_mask, select_top
from whalepod.kernels.launch_sizes import architecture_of, read_table, sizes_by_shape
from whalepod.kernels.linear import grouped_linear, linear
from whalepod.kernels.mhc import Mixes, collapse, expand, predict_mixes, prepare_weights
from whalepod.kernels.mhc import reference as mhc_reference
from whalepod.kernels.numerics import whole_batches
from whalepod.kernels.packed_index_scores import packed_index_scores
from whalepod.kernels.packed_index_scores import reference as scores_reference
from whalepod.kernels.quantise import FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat, round_trip
from whalepod.kernels.rms_norm import reference as norm_reference
from whalepod.kernels.rms_norm import rms_norm, rms_norm_fp8
from whalepod.kernels.router import reference as router_reference
from whalepod.kernels.router import route
from whalepod.kernels.top_entries import reference as top_reference
from whalepod.kernels.top_entries import top_entries
from whalepod.kernels.tuning import tune

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs a GPU"
)


@pytest.mark.parametrize("rows", [48, 1536])
def test_norms(rows: int) -> None:
    x, weight = bf16(rows, HIDDEN), bf16(HIDDEN, seed=1)
    wanted = norm_reference.rms_norm(x.float(), weight.float(), eps=1e-20)
    assert_close(rms_norm(x, weight, eps=1e-20), wanted)
    out, codes, scales = rms_norm_fp8(x, weight, eps=1e-20)
    assert_close(out, wanted)
    assert torch.equal(torch.cat((codes, scales), dim=1), FP8_BLOCK32.encode(out))


def test_round_trips() -> None:
    x = bf16(384, HIDDEN) * torch.exp(draw(384, HIDDEN, seed=2) * 3).bfloat16()
    assert torch.equal(round_trip(x, FP8_BLOCK32), FP8_BLOCK32.decode(FP8_BLOCK32.encode(x), HIDDEN, x.dtype))


@pytest.mark.parametrize("rows", [1, 48, 1536])
def test_index_queries(rows: int) -> None:
    queries, (cos, sin) = bf16(rows, 32, KEY_WIDTH), angles(rows)
    ours, wanted = index_queries(queries, cos, sin), queries_reference.index_queries(queries, cos, sin)
    assert (ours != wanted).float().mean() < 1e-3


@pytest.mark.parametrize("rows", [1, 48, 65, 1536, 4096])
def test_hyper_connections(rows: int) -> None:
    streams, y = bf16(rows, 4, HIDDEN), bf16(rows, HIDDEN, seed=1)
    fn, scale, base = draw(24, 4 * HIDDEN, seed=2) * 0.02, draw(24, seed=3), draw(24, seed=4)
    given = (streams, fn, scale, base)
    wanted = mhc_reference.predict_mixes(*(x.double() for x in given), rms_eps=1e-20, eps=1e-6, iterations=20)
    predict = partial(predict_mixes, streams, prepare_weights(fn), scale, base, rms_eps=1e-20, eps=1e-6, iterations=20)
    with whole_batches():
        mixes, again = predict(), predict()
    for ours, same, part in zip(mixes, again, wanted, strict=True):
        assert_close(ours, part, 1e-5)
        assert torch.equal(ours, same)
    assert_close(collapse(streams, mixes.pre), mhc_reference.collapse(streams.float(), mixes.pre))
    expanded = mhc_reference.expand(y.float(), streams.float(), mixes)
    assert_close(expand(y, streams, mixes), expanded)


def test_rows_have_the_same_bits_alone_and_among_others() -> None:
    count = 4200  # So many programs that kernels no longer begin before others have ended.
    streams, gates, (cos, sin) = bf16(count, 4, HIDDEN), bf16(count, 2 * 2304), angles(count)
    projected, gate_weight = bf16(count, 5 * HIDDEN, seed=6), bf16(4, HIDDEN, seed=7)
    fn = prepare_weights(draw(24, 4 * HIDDEN, seed=2) * 0.02)
    scale, base, weight = draw(24, seed=3), draw(24, seed=4), bf16(HIDDEN, seed=5)

    def results(rows: slice) -> list[Tensor]:
        mixes = predict_mixes(streams[rows], fn, scale, base, rms_eps=1e-20, eps=1e-6, iterations=20)
        x = collapse(streams[rows], mixes.pre)
        return [
            *mixes,
            expand(x, streams[rows], Mixes(*mixes)),
            let_in(streams[rows], projected[rows], gate_weight, None, eps=1e-20),
            *rms_norm_fp8(x, weight, eps=1e-20),
            swiglu(gates[rows], limit=10.0, round_trip=True),
            round_trip(x, FP8_BLOCK32),
            index_queries(streams[rows, 0].unflatten(1, (-1, KEY_WIDTH))[:, :32], cos[rows], sin[rows]),
        ]

    together = results(slice(0, count))
    for rows in (slice(0, 1), slice(7, 9), slice(60, 133), slice(count - 1, count)):
        for alone, among in zip(results(rows), together, strict=True):
            assert torch.equal(alone, among[rows])


@pytest.mark.parametrize("entries", [20_000, 131_072])
def test_candidates_and_the_best_among_them(entries: int) -> None:
    rows, heads, block, top_blocks, per_block = 12, 32, 8, 2048, 256
    blocks_each = -(-entries // per_block)
    queries = MXFP4_BLOCK32.round_trip(bf16(rows, heads, KEY_WIDTH))
    weights = draw(rows, heads, seed=1) * (KEY_WIDTH * heads) ** -0.5
    keys = MXFP4_BLOCK32.encode(draw(2 * blocks_each * per_block, KEY_WIDTH, seed=2))
    generator = torch.Generator("cuda").manual_seed(3)
    tables = torch.randperm(2 * blocks_each, device="cuda", generator=generator).int().view(2, blocks_each)
    segments = torch.arange(2, device="cuda", dtype=torch.int32).repeat_interleave(rows // 2)
    visible = (entries - rows // 2 + 1 + torch.arange(rows // 2, device="cuda").repeat(2)).int()
    groups = torch.tensor([[0, 6], [6, 6], [0, 1]], dtype=torch.int32, device="cuda")
    scores = packed_index_scores(
        queries, weights, keys, tables, segments, visible, groups, entries_per_block=per_block, group_rows=6,
        entries_max=blocks_each * per_block,
    )  # fmt: skip
    wanted = scores_reference.packed_index_scores(
        queries, weights, keys, tables, visible, groups, entries_per_block=per_block,
        entries_max=blocks_each * per_block,
    )  # fmt: skip
    seen = torch.arange(blocks_each * per_block, device="cuda") < visible[:, None]
    assert_close(scores[seen], wanted[seen], 1e-5)

    blocks = candidate_blocks(scores, visible, block=block, top_blocks=top_blocks)
    mask = candidate_mask(scores.masked_fill(~seen, -torch.inf), visible.long(), block=block, top_blocks=top_blocks)
    for row in range(rows):
        found = blocks[row][blocks[row] >= 0]
        assert torch.equal(found.long(), mask[row, ::block].nonzero().flatten())
    arguments = (queries, weights, keys, tables, segments, visible, blocks)
    ours, counts = candidate_scores(*arguments, block=block, entries_per_block=per_block)
    wanted = candidates_reference.candidate_scores(*arguments, block=block, entries_per_block=per_block)
    assert torch.equal(counts, candidates_reference.seen_candidates(blocks, visible, block=block))
    there = torch.arange(top_blocks * block, device="cuda") < counts[:, None]
    assert_close(ours[there], wanted[there], 1e-5)
    chosen, places = entry_places(
        top_entries(ours, counts, count=512), tables, segments, blocks, block=block, entries_per_block=per_block
    )
    best = select_top(scores.masked_fill(~seen, -torch.inf), mask & seen, count=512)
    # The same products summed in another order: a score in the middle of a tie may fall to either side.
    assert (chosen.long() != best).float().mean() < 0.02
    again = tables[segments.long()[:, None], chosen.long() // per_block] * per_block + chosen % per_block
    assert torch.equal(places, again)


@pytest.mark.parametrize("count", [1, 512, 2048])
@pytest.mark.parametrize("rows", [48, 384])
def test_the_best_of_rows_that_see_few_and_many_entries(rows: int, count: int) -> None:
    scores = draw(rows, 131_072)
    visible = draw(rows, seed=1).sigmoid().mul(131_072).int()
    visible[::3] //= 16
    for given in (scores, scores.clamp(min=0), scores.mul(4).round(), scores.where(scores > 0, -torch.inf)):
        assert torch.equal(
            top_entries(given, visible, count=count), top_reference.top_entries(given, visible, count=count)
        )


@pytest.mark.parametrize("width", [32, 64])
def test_scores_of_keys_of_another_width(width: int) -> None:
    """Records of 17 and 34 bytes, which are aligned to nothing."""
    rows, heads, per_block = 40, 16, 8
    keys = MXFP4_BLOCK32.encode(draw(20 * per_block, width, seed=2))
    tables = torch.arange(20, device="cuda", dtype=torch.int32).flip(0)[None]
    segments = torch.zeros(rows, device="cuda", dtype=torch.int32)
    visible = torch.arange(rows, device="cuda", dtype=torch.int32) + 80
    groups = torch.tensor([[0], [rows], [0]], dtype=torch.int32, device="cuda")
    given = (MXFP4_BLOCK32.round_trip(bf16(rows, heads, width)), draw(rows, heads, seed=1), keys, tables)
    sizes = {"entries_per_block": per_block, "entries_max": 128}
    ours = packed_index_scores(*given, segments, visible, groups, group_rows=8, **sizes)
    wanted = scores_reference.packed_index_scores(*given, visible, groups, **sizes)
    seen = torch.arange(128, device="cuda") < visible[:, None]
    assert_close(ours[seen], wanted[seen], 1e-5)


@pytest.mark.parametrize("rows", [48, 1536])
def test_choice_of_experts(rows: int) -> None:
    x, weight, bias = bf16(rows, HIDDEN), bf16(384, HIDDEN, seed=1) * HIDDEN**-0.5, draw(384, seed=2) * 0.1
    ids, weights = route(x, weight, bias, chosen=6, factor=1.5)
    wanted_ids, wanted = router_reference.route(x.float(), weight.float(), bias, chosen=6, factor=1.5)
    same = (ids == wanted_ids).all(dim=1)
    assert same.float().mean() > 0.98
    assert_close(weights[same], wanted[same], 1e-3)


def test_gated_memories() -> None:
    streams, projected, weight = bf16(384, 4, HIDDEN), bf16(384, 5 * HIDDEN, seed=1), bf16(4, HIDDEN, seed=2)
    text = torch.arange(384, device="cuda") % 3 > 0
    wanted = gate_reference.let_in(streams.float(), projected.float(), weight.float(), text, eps=1e-20)
    assert_close(let_in(streams, projected, weight, text, eps=1e-20), wanted)


@pytest.mark.parametrize("input_format", [None, FP8_BLOCK32], ids=["plain", "fp8"])
@pytest.mark.parametrize("rows", [7, 200])
def test_experts(rows: int, input_format: PackedFormat | None) -> None:
    experts, columns, choices = 24, 2304, 6
    gate_up = (draw(experts, 2 * columns, HIDDEN, seed=1) * HIDDEN**-0.5).bfloat16()
    down = (draw(experts, HIDDEN, columns, seed=2) * columns**-0.5).bfloat16()
    x, weights = bf16(rows, HIDDEN), torch.softmax(draw(rows, choices, seed=3), dim=1)
    ids = draw(rows, experts, seed=4).argsort(dim=1)[:, :choices]
    # Three results are rounded one after the other: gates and values, hidden, output.
    check = partial(assert_close, tolerance=2 * BF16 if input_format is None else 2e-2)
    ours = routed_experts(x, ids, weights, gate_up, down, limit=10.0, input_format=input_format)
    wanted = experts_reference.routed_experts(x, ids, weights, gate_up, down, limit=10.0, input_format=input_format)
    check(ours, wanted)
    ours = dense_expert(x, gate_up[0], down[0], limit=10.0, input_format=input_format)
    check(ours, experts_reference.dense_expert(x, gate_up[0], down[0], limit=10.0, input_format=input_format))


@pytest.mark.parametrize("input_format", [None, FP8_BLOCK32], ids=["plain", "fp8"])
def test_outputs_of_pairs_have_the_bits_of_routed_experts(input_format: PackedFormat | None) -> None:
    experts, columns, choices, rows = 24, 2304, 6, 200
    gate_up = (draw(experts, 2 * columns, HIDDEN, seed=1) * HIDDEN**-0.5).bfloat16()
    down = (draw(experts, HIDDEN, columns, seed=2) * columns**-0.5).bfloat16()
    x, weights = bf16(rows, HIDDEN), torch.softmax(draw(rows, choices, seed=3), dim=1)
    ids = draw(rows, experts, seed=4).argsort(dim=1)[:, :choices]
    pairs = torch.arange(rows, device="cuda").repeat_interleave(choices)
    absent = torch.full((50,), experts, device="cuda")
    outputs = expert_outputs(
        x,
        torch.cat((pairs, pairs[:50])),
        torch.cat((ids.flatten(), absent)),
        gate_up,
        down,
        limit=10.0,
        input_format=input_format,
    )[: len(pairs)]
    wanted = routed_experts(x, ids, weights, gate_up, down, limit=10.0, input_format=input_format)
    assert torch.equal(combine_outputs(outputs.unflatten(0, ids.shape), weights), wanted)
    assert torch.equal(gather_sum(outputs, torch.arange(len(pairs), device="cuda").view(ids.shape), weights), wanted)


@pytest.mark.parametrize("rows", [0, 1, 48, 500])
def test_messages_to_experts(rows: int) -> None:
    x, ids = bf16(rows, HIDDEN), draw(rows, 96, seed=1).argsort(dim=1)[:, :6]
    placement = even_placement(96, 4, redundant=8)
    table = placement.table_on(x.device)
    layout = MessageLayout(512, 6, HIDDEN, torch.bfloat16, FP8_BLOCK32)
    messages, places = pack(x, ids, table, layout, source=1, size=4)
    ours, slots = unpack(messages, layout, absent=99)
    wanted, wanted_places = messages_reference.pack(x, ids, table, layout, source=1, size=4)
    wanted_rows, wanted_slots = messages_reference.unpack(wanted, layout, absent=99)
    assert torch.equal(places, wanted_places)
    assert torch.equal(slots, wanted_slots)
    there = (slots < 99).view(-1, 6).any(dim=1)
    assert torch.equal(ours[there], wanted_rows[there])


def test_rows_and_outputs_written_to_where_they_are_read() -> None:
    """Ranks' memories are all on this device; what they write is what they would have exchanged."""
    size, layout = 2, MessageLayout(48, 6, HIDDEN, torch.bfloat16, FP8_BLOCK32)
    outputs_start, total = Inboxes.room(layout, size)
    memory = [torch.zeros(total + 16 * size, dtype=torch.uint8, device="cuda") for _ in range(size)]
    addresses = torch.tensor([each.data_ptr() for each in memory], device="cuda")
    inboxes = [Inboxes(addresses, own, outputs_start) for own in memory]
    table = even_placement(96, size).table_on(torch.device("cuda"))
    drawn = [(bf16(rows, HIDDEN, seed=rows), draw(rows, 96, seed=1).argsort(dim=1)[:, :6]) for rows in (48, 7)]
    for source, (x, ids) in enumerate(drawn):
        put_rows(x, ids, table, layout, inboxes[source], source=source)
    signals = addresses + total
    round_number = torch.zeros(1, dtype=torch.int32, device="cuda")
    ended = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    pads = [own[total : total + 4 * size].view(torch.int32) for own in memory]
    pads[0].fill_(1)
    meet(signals, pads[0], round_number, ended, rank=0)
    ended.fill_(1)
    meet(signals, pads[0], round_number, ended, rank=0)  # nobody comes, and it is told so
    assert [pad.tolist() for pad in pads] == [[2, 1], [2, 0]]
    packed = [messages_reference.pack(*each, table, layout, source=n, size=size) for n, each in enumerate(drawn)]
    made = []
    for rank in range(size):
        rows, slots = unpack(inboxes[rank].messages(layout), layout, absent=99)
        wanted = torch.stack([messages[rank] for messages, _ in packed])
        wanted_rows, wanted_slots = messages_reference.unpack(wanted, layout, absent=99)
        there = (slots < 99).view(-1, 6).any(dim=1)
        assert torch.equal(slots, wanted_slots) and torch.equal(rows[there], wanted_rows[there])
        made.append(draw(size * layout.pairs, HIDDEN, seed=rank))
        put_outputs(made[rank], slots, layout, inboxes[rank], absent=99)
    for source, (_, places) in enumerate(packed):
        back = torch.cat([outputs.view(size, layout.pairs, HIDDEN)[source] for outputs in made])
        assert torch.equal(inboxes[source].outputs(layout)[: places.numel()], back[places.flatten()])


def test_products() -> None:
    x, weight = bf16(48, HIDDEN), bf16(1280, HIDDEN, seed=1)
    wanted = x.float() @ weight.float().t()
    assert_close(linear(x, weight), wanted)
    assert_close(linear(x, weight, out_dtype=torch.float32), wanted, 1e-5)
    x, weight = bf16(48, 8, 4096), bf16(8, 1024, 4096, seed=1)
    assert_close(grouped_linear(x, weight), torch.einsum("rgi,goi->rgo", x.float(), weight.float()))


def test_few_rows_are_unsure() -> None:
    logits, rows = draw(384, 129_280) * 3, torch.arange(384, device="cuda")
    ids, unsure = sampling.draw(logits, torch.ones(384, device="cuda"), sampling.Noise(rows, rows))
    wanted, _ = sampling.reference.draw(logits, torch.ones(384, device="cuda"), sampling.Noise(rows, rows))
    assert not unsure.any() and torch.equal(ids, wanted)


def test_the_tuner_tries_sizes_and_leaves_what_is_right(tmp_path: Path) -> None:
    """A kernel whose sizes change no bits, and one whose sizes do; times of so few rows are left open."""
    table = tmp_path / "table.json"
    figures = tune(["index_queries", "engram_gate"], [7], table)
    assert (figures["kernels"], figures["lines"]) == (2, 2)
    assert (
        set(sizes_by_shape(architecture_of(torch.device("cuda"))))
        >= set(read_table(table).kernels)
        >= {
            "index_queries",
            "engram_gate",
        }
    )
