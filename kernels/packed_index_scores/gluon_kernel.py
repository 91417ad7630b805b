"""Index scores over packed MXFP4 keys for Hopper: keys go from memory to the matrix units through registers alone.

As `triton_kernel.py`, whose conversions and exactness these are, but for the order of the channels. Which channels a
product adds at a time is free as long as keys and queries agree. So they lie as the left operand of a matrix
instruction wants them: each of the four threads that hold a key has one scale group of it, 16 successive bytes of
codes. It loads them, looks their FP8 values up in the group's own table, and multiplies; nothing passes through shared
memory. Programs of four warps, four a processor, overlap one another's loads, conversions, products and sums.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from whalepod.kernels.launch_sizes import launch_sizes

from .triton_kernel import SPREAD_MAX, to_fp8_asm

KEYS = gl.constexpr(64)
"""Keys of a tile, the rows of one matrix instruction."""
CODE_BYTES = gl.constexpr(64)
RECORD_BYTES = gl.constexpr(68)
ROWS_EACH = 2
"""Rows of one product."""

TO_FP8_ASM = gl.constexpr(to_fp8_asm("$3", "$4"))
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0, 0], [0, 1, 0], [0, 2, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, 4],
    )
)
"""[key, word of its group, group]: words of four bytes as the left operand of an FP8 matrix instruction holds them."""
BY_GROUP = gl.constexpr(gl.SliceLayout(1, WORDS))
BY_KEY = gl.constexpr(gl.SliceLayout(1, BY_GROUP))


@gluon.jit
def _code_byte(column):
    """The byte of a key's codes at `column` of an operand, which has [word, group, byte] for [group, word, byte]."""
    return column // 4 % 4 * 16 + column // 16 * 4 + column % 4


@gluon.jit
def _query_tile(queries, weights, row_start, row_count, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """As `triton_kernel.query_tile`: even, odd channels [ROWS · HEADS, 64] as E4M3, and the heads' weights."""
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    by_head: gl.constexpr = gl.SliceLayout(1, flat)
    head = gl.arange(0, ROWS * HEADS, by_head)
    there = head < row_count * HEADS
    first = row_start.to(gl.int64) * HEADS
    pair = _code_byte(gl.arange(0, CODE_BYTES, gl.SliceLayout(0, flat)))
    at = (first + head)[:, None] * CODE_BYTES + pair[None, :]
    words = gl.load(queries.to(gl.pointer_type(gl.int32), bitcast=True) + at, mask=there[:, None], other=0)
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    weight = gl.load(weights + first + head, mask=there, other=0.0)
    highest = gl.maximum(gl.max(gl.abs(even), 1), gl.max(gl.abs(odd), 1))
    exponent = (gl.maximum(highest, 1e-30).to(gl.int32, bitcast=True) >> 23) - 127
    scale = ((134 - exponent) << 23).to(gl.float32, bitcast=True)
    weight = weight * ((120 + exponent) << 23).to(gl.float32, bitcast=True)
    return (even * scale[:, None]).to(gl.float8e4nv), (odd * scale[:, None]).to(gl.float8e4nv), weight


@gluon.jit
def _records(table, tile_start, visible, ENTRIES: gl.constexpr):
    """Where the records of a tile's keys begin; those that nobody sees stand for some of the pool's first block."""
    entry = tile_start + gl.arange(0, KEYS, BY_KEY)
    blocks = gl.load(table + entry // ENTRIES, mask=entry < visible, other=0)
    return (blocks.to(gl.int64) * ENTRIES + entry % ENTRIES) * RECORD_BYTES


@gluon.jit
def _load(keys, record):
    """Codes as words [KEYS, 4, 4] int32 and scale bytes [KEYS, 4] int32, as `WORDS` has them."""
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    group = gl.arange(0, 4, gl.SliceLayout(0, BY_GROUP))
    begin = keys + gl.multiple_of(record, 4)[:, None]
    codes = (begin + (16 * group)[None, :])[:, None, :] + (4 * word)[None, :, None]
    codes = gl.load(codes.to(gl.pointer_type(gl.int32), bitcast=True))
    return codes, gl.load(begin + (CODE_BYTES + group)[None, :]).to(gl.int32)


@gluon.jit
def _bytes(words, operand: gl.constexpr):
    """Words [KEYS, 4, 4] -> their bytes as E4M3 operand [KEYS, 64]."""
    near = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    far = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    flat = gl.join(near, far).reshape((KEYS, CODE_BYTES))
    return gl.convert_layout(flat, operand, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _fp8_keys(codes, scale, operand: gl.constexpr):
    """As `triton_kernel.fp8_keys`: even, odd channels [KEYS, 64] as E4M3 and the keys' scales [KEYS]."""
    largest = gl.max(scale, 1)
    shift = largest[:, None] - scale
    near = shift <= SPREAD_MAX
    steps = 6 - shift
    small = gl.where(near, 0x3C383000 + steps * 0x08080800, 0)
    large = gl.where(near, 0x4C484440 + steps * 0x08080808, 0)
    small = gl.expand_dims(small, 1).broadcast_to((KEYS, 4, 4))
    large = gl.expand_dims(large, 1).broadcast_to((KEYS, 4, 4))
    even, odd = gl.inline_asm_elementwise(
        TO_FP8_ASM, "=&r,=&r,r,r,r", [codes, small, large], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    key_scale = (gl.maximum(largest - 6, 1) << 23).to(gl.float32, bitcast=True)
    return _bytes(even, operand), _bytes(odd, operand), key_scale


@gluon.jit
def _hold_rows(queries, weights, row_start, row_count, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """Shared memory with the tile of ROWS rows' heads: even channels, odd channels, half of the weights."""
    layout: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    even, odd, weight = _query_tile(queries, weights, row_start, gl.minimum(row_count, ROWS), ROWS, HEADS)
    evens = gl.allocate_shared_memory(gl.float8e4nv, [ROWS * HEADS, CODE_BYTES], layout, even)
    odds = gl.allocate_shared_memory(gl.float8e4nv, [ROWS * HEADS, CODE_BYTES], layout, odd)
    halves = gl.allocate_shared_memory(gl.float32, [ROWS * HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]), weight * 0.5)
    return evens, odds, halves


@gluon.jit
def _heads_of_threads(table, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """[KEYS, ROWS · HEADS] -> HEADS / 4 tensors [KEYS, ROWS, 4]: heads of one thread, of the four that share a key."""
    EACH: gl.constexpr = HEADS // 4
    by_thread = table.reshape((KEYS, ROWS, EACH // 2, 4, 2)).permute((0, 1, 3, 2, 4))
    heads = (by_thread.reshape((KEYS, ROWS, 4, EACH)),)
    for bit in gl.static_range(6):
        if 2**bit < EACH:
            halves = ()
            for place in gl.static_range(2**bit):
                pairs = heads[place].reshape((KEYS, ROWS, 4, EACH // 2 ** (bit + 1), 2))
                halves = halves + gl.split(pairs)
            heads = halves
    return heads


@gluon.jit
def _weighted_sums(products, halves, ROWS: gl.constexpr, HEADS: gl.constexpr):
    """Products [KEYS, ROWS · HEADS] and half of each head's weight -> [KEYS, ROWS].

    Each addition is fused with the multiplication of the same head, and which that is is not left to the compiler: it
    chose differently for different rows, so that a score's bits depended on the row's place among those that share its
    keys.
    """
    terms = _heads_of_threads(products + gl.abs(products), ROWS, HEADS)
    weights = _heads_of_threads(halves[None, :].broadcast_to(products.shape), ROWS, HEADS)
    sums = terms[0] * weights[0]
    for place in gl.static_range(1, HEADS // 4):
        sums = gl.fma(terms[place], weights[place], sums)
    return gl.sum(sums.reshape((KEYS, ROWS, 4)), 2)


@gluon.jit
def _score_rows(
    even, odd, key_scale, held, scores, stride, tile_start, row_start, row_count, ROWS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Scores of a tile of keys for ROWS rows. weight · max(p, 0) is half of weight · (p + |p|): an addition runs at
    twice the rate of a comparison."""
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS * HEADS, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, product, 4)
    even = gl.convert_layout(even, operand, assert_trivial=True)
    odd = gl.convert_layout(odd, operand, assert_trivial=True)
    products = gl.zeros((KEYS, ROWS * HEADS), gl.float32, product)
    products = warpgroup_mma(even, held[0].permute((1, 0)), products, use_acc=False, is_async=True)
    products = warpgroup_mma(odd, held[1].permute((1, 0)), products, is_async=True)
    products = warpgroup_mma_wait(0, deps=[products])
    sums = _weighted_sums(products, held[2].load(gl.SliceLayout(0, product)), ROWS, HEADS)
    layout: gl.constexpr = sums.type.layout
    sums = sums * gl.convert_layout(key_scale, gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    entry = tile_start + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    target = (row_start + row).to(gl.int64)[None, :] * stride + entry[:, None]
    gl.store(scores + target, sums, mask=(row < row_count)[None, :] & (entry < stride)[:, None])


@gluon.jit
def index_scores_kernel(
    queries, weights, keys, tables, table_stride, visible, group_starts, group_counts, group_sequences, scores, stride,
    ENTRIES: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Program (group, part): scores of PARTS times ROWS rows of one sequence, for every so many-th tile of keys."""
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32]), 4)
    group = gl.program_id(0)
    start = gl.load(group_starts + group)
    count = gl.load(group_counts + group)
    table = tables + gl.load(group_sequences + group).to(gl.int64) * table_stride
    held = ()
    for part in gl.static_range(PARTS):
        more = _hold_rows(queries, weights, start + part * ROWS, count - part * ROWS, ROWS, HEADS)
        held = held + (more,)  # noqa: RUF005
    fence_async_shared()
    newest = gl.load(visible + start + count - 1)
    step = gl.num_programs(1) * KEYS
    first = gl.program_id(1) * KEYS
    codes, scale = _load(keys, _records(table, first, newest, ENTRIES))
    record = _records(table, first + step, newest, ENTRIES)
    for tile_start in range(first, newest, step):
        even, odd, key_scale = _fp8_keys(codes, scale, operand)
        codes, scale = _load(keys, record)
        record = _records(table, tile_start + 2 * step, newest, ENTRIES)
        for part in gl.static_range(PARTS):
            _score_rows(
                even, odd, key_scale, held[part], scores, stride, tile_start, start + part * ROWS, count - part * ROWS,
                ROWS, HEADS)  # fmt: skip


def packed_index_scores(
    queries: Tensor,
    weights: Tensor,
    keys: Tensor,
    tables: Tensor,
    visible: Tensor,
    groups: Tensor,
    *,
    entries_per_block: int,
    group_rows: int,
    entries_max: int,
) -> Tensor:
    """As `whalepod.kernels.packed_index_scores`, for bfloat16 queries of 128 channels on Hopper."""
    rows, heads, _ = queries.shape
    scores = torch.empty(rows, entries_max, dtype=torch.float32, device=queries.device)
    if rows == 0 or entries_max == 0:
        return scores
    count = groups.shape[1]
    sizes = launch_sizes("index_scores_hopper", queries, rows=rows, shape=heads)
    processors = torch.cuda.get_device_properties(queries.device).multi_processor_count
    parts = min(triton.cdiv(entries_max, KEYS.value), max(1, processors * sizes["programs"] // count))
    index_scores_kernel[(count, parts)](
        queries.contiguous(),
        weights,
        keys,
        tables,
        tables.stride(0),
        visible,
        groups[0],
        groups[1],
        groups[2],
        scores,
        scores.stride(0),
        ENTRIES=entries_per_block,
        HEADS=heads,
        ROWS=ROWS_EACH,
        PARTS=triton.cdiv(group_rows, ROWS_EACH),
        num_warps=4,
        maxnreg=sizes["maxnreg"],
        # Which of two products an addition is fused with is the compiler's choice, and differed between ROWS rows: a
        # score's bits depended on the row's place among those that share its keys.
        enable_fp_fusion=False,
    )
    return scores
