"""Attention over packed rows in Triton: a program takes a query row (or a part of its keys), and all heads or some.

Even and odd channels live in two tensors of half the width. So a byte of two FP4 codes, or two bytes of FP8 codes, fall
apart into the two halves without any exchange between threads, and a pair of channels that RoPE rotates is the same
place of both. Codes become bfloat16 by moving their bits: the code's exponent is too small by a power of two, which the
multiplication with the group's scale makes good. Both products are exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes

from .unpacking import FP4_EXPONENT, FP8_EXPONENT, SHIFT, UNPACK_FP4_ASM, UNPACK_FP8_ASM

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _bf16_of_bits(bits):
    """int32 holding bfloat16 bits -> bfloat16, without inline assembly."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_fp8(words, scales, FAST: tl.constexpr):
    """words int16 (even channel in the low byte), scales bfloat16 of the same shape -> even, odd channels bfloat16."""
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            UNPACK_FP8_ASM,
            "=r,=r,r,r",
            [words, scales],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        wide = scales.to(tl.float32)
        even = (_bf16_of_bits(((bits << 8) & 0x8000) | ((bits << 4) & 0x07F0)) * wide).to(tl.bfloat16)
        odd = (_bf16_of_bits((bits & 0x8000) | ((bits >> 4) & 0x07F0)) * wide).to(tl.bfloat16)
    return even, odd


@triton.jit
def _unpack_fp4(codes, scales, FAST: tl.constexpr):
    """codes int8 (even channel in the low nibble), scales bfloat16 of the same shape -> even, odd channels bfloat16."""
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            UNPACK_FP4_ASM,
            "=r,=r,=r,=r,r,r,r",
            [codes, scales],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        bits = codes.to(tl.int32)
        wide = scales.to(tl.float32)
        even = (_bf16_of_bits(((bits << 12) & 0x8000) | ((bits << 6) & 0x01C0)) * wide).to(tl.bfloat16)
        odd = (_bf16_of_bits(((bits << 8) & 0x8000) | ((bits << 2) & 0x01C0)) * wide).to(tl.bfloat16)
    return even, odd


@triton.jit
def _record_starts(rows, BYTES: tl.constexpr):
    """Where records begin. The released model's are whole vectors, which lets them be read as such."""
    start = rows.to(tl.int64) * BYTES
    if BYTES % 16 == 0:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def _fp8_rows(records, rows, valid, HALF: tl.constexpr, FAST: tl.constexpr):
    """Rows of FP8 records (width codes, then a power of two per 32 channels) -> even, odd [keys, HALF] bfloat16."""
    GROUPS: tl.constexpr = HALF // 16
    BYTES: tl.constexpr = 2 * HALF + GROUPS
    start = _record_starts(rows, BYTES)
    columns = tl.arange(0, HALF)
    words = tl.load(
        (records + start[:, None]).to(tl.pointer_type(tl.int16)) + columns[None, :],
        mask=valid[:, None],
        other=0,
    )
    groups = tl.arange(0, GROUPS)
    scale_bytes = tl.load(records + start[:, None] + (2 * HALF + groups)[None, :], mask=valid[:, None], other=0)
    exponents = tl.minimum(scale_bytes.to(tl.int32) + (FP8_EXPONENT - SHIFT), 254)
    scales = (exponents << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    scales = tl.broadcast_to(scales[:, :, None], (rows.shape[0], GROUPS, 16)).reshape(rows.shape[0], HALF)
    return _unpack_fp8(words, scales, FAST)


@triton.jit
def _fp4_rows(records, rows, valid, HALF: tl.constexpr, FAST: tl.constexpr):
    """Rows of FP4 records (two codes a byte, then an E4M3 scale per 16 channels) -> even, odd [keys, HALF] bfloat16."""
    GROUPS: tl.constexpr = HALF // 8
    BYTES: tl.constexpr = HALF + GROUPS
    start = _record_starts(rows, BYTES)
    columns = tl.arange(0, HALF)
    codes = tl.load(
        records.to(tl.pointer_type(tl.int8)) + start[:, None] + columns[None, :],
        mask=valid[:, None],
        other=0,
    )
    groups = tl.arange(0, GROUPS)
    scale_bytes = tl.load(records + start[:, None] + (HALF + groups)[None, :], mask=valid[:, None], other=0)
    scales = scale_bytes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * 2.0 ** (FP4_EXPONENT - SHIFT)
    scales = scales.to(tl.bfloat16)
    scales = tl.broadcast_to(scales[:, :, None], (rows.shape[0], GROUPS, 8)).reshape(rows.shape[0], HALF)
    return _unpack_fp4(codes, scales, FAST)


@triton.jit
def _attend(
    query_even, query_odd, even, odd, valid, highest, total, out_even, out_odd, logit_scale, FAST: tl.constexpr
):
    """One tile of keys of the running softmax; all in powers of two."""
    if not FAST:  # the interpreter multiplies no bfloat16
        even, odd = even.to(tl.float32), odd.to(tl.float32)
    logits = tl.dot(query_even, tl.trans(even))
    logits = tl.dot(query_odd, tl.trans(odd), logits) * logit_scale
    logits = tl.where(valid[None, :], logits, float("-inf"))
    higher = tl.maximum(highest, tl.max(logits, 1))
    weights = tl.exp2(logits - higher[:, None])
    keep = tl.exp2(highest - higher)
    total = total * keep + tl.sum(weights, 1)
    rounded = weights.to(tl.bfloat16).to(even.dtype)
    out_even = tl.dot(rounded, even, out_even * keep[:, None])
    out_odd = tl.dot(rounded, odd, out_odd * keep[:, None])
    return higher, total, out_even, out_odd


@triton.jit
def _write_rotated(
    out,
    even,
    odd,
    cos,
    sin,
    row,
    head,
    in_range,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Turn the last 2 · PAIRS channels back by the row's angles and store [heads, 2 · HALF] as bfloat16."""
    columns = tl.arange(0, HALF)
    pair = columns - (HALF - PAIRS)
    c = tl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    turned_even = (even * c + odd * s).to(tl.bfloat16)
    turned_odd = (odd * c - even * s).to(tl.bfloat16)
    target = (row.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + 2 * columns[None, :]
    if FAST:
        low = turned_even.to(tl.uint16, bitcast=True).to(tl.uint32)
        high = turned_odd.to(tl.uint16, bitcast=True).to(tl.uint32)
        words = (out + target).to(tl.pointer_type(tl.uint32))
        tl.store(words, low | (high << 16), mask=in_range[:, None])
    else:
        tl.store(out + target, turned_even, mask=in_range[:, None])
        tl.store(out + target + 1, turned_odd, mask=in_range[:, None])


@triton.jit
def sparse_attention_kernel(
    queries,
    window,
    bases,
    positions,
    lowest,
    entries,
    chosen,
    sink,
    cos,
    sin,
    out,
    part_out,
    part_stats,
    logit_scale,
    ring,
    window_rows,
    chosen_stride,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    head = tl.program_id(2) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    in_range = head < HEADS
    columns = tl.arange(0, HALF)
    query_at = (row.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + 2 * columns[None, :]
    if FAST:
        pairs = tl.load((queries + query_at).to(tl.pointer_type(tl.uint32)), mask=in_range[:, None], other=0)
        query_even = (pairs & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        query_odd = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        query_even = tl.load(queries + query_at, mask=in_range[:, None], other=0.0).to(tl.float32)
        query_odd = tl.load(queries + query_at + 1, mask=in_range[:, None], other=0.0).to(tl.float32)
    pair = columns - (HALF - PAIRS)
    c = tl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)[None, :]
    s = tl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)[None, :]
    still_even, still_odd = query_even.to(tl.float32), query_odd.to(tl.float32)
    query_even = (still_even * c - still_odd * s).to(tl.bfloat16).to(query_even.dtype)
    query_odd = (still_odd * c + still_even * s).to(tl.bfloat16).to(query_odd.dtype)

    sink_logit = tl.load(sink + head, mask=in_range, other=float("-inf")) * LOG2_E
    if PARTS == 1:
        highest = tl.maximum(sink_logit, LOWEST)
        total = tl.exp2(sink_logit - highest)
    else:
        highest = tl.full((HEAD_BLOCK,), LOWEST, tl.float32)
        total = tl.zeros((HEAD_BLOCK,), tl.float32)
    out_even = tl.zeros((HEAD_BLOCK, HALF), tl.float32)
    out_odd = tl.zeros((HEAD_BLOCK, HALF), tl.float32)
    key = tl.arange(0, KEYS)

    # Tiles of the window come first, then tiles of chosen entries; a part takes consecutive ones.
    position = tl.load(positions + row)
    first = tl.maximum(position - window_rows + 1, tl.load(lowest + row))
    window_tiles = tl.cdiv(position + 1 - first, KEYS)
    entry_count = 0
    if CHOSEN > 0:
        every = tl.load(chosen + row.to(tl.int64) * chosen_stride + tl.arange(0, CHOSEN))
        entry_count = tl.sum((every >= 0).to(tl.int32), 0)
    tiles = window_tiles + tl.cdiv(entry_count, KEYS)
    tile_start = part * tiles // PARTS
    tile_end = (part + 1) * tiles // PARTS

    base = tl.load(bases + row)
    for tile in range(tile_start, tl.minimum(tile_end, window_tiles)):
        at = first + tile * KEYS + key
        valid = at <= position
        even, odd = _fp8_rows(window, base + at % ring, valid, HALF, FAST)
        highest, total, out_even, out_odd = _attend(
            query_even, query_odd, even, odd, valid, highest, total, out_even, out_odd, logit_scale, FAST
        )
    if CHOSEN > 0:
        for tile in range(tl.maximum(tile_start, window_tiles), tile_end):
            place = (tile - window_tiles) * KEYS + key
            valid = place < entry_count
            rows = tl.load(chosen + row.to(tl.int64) * chosen_stride + place, mask=valid, other=0)
            even, odd = _fp4_rows(entries, rows, valid, HALF, FAST)
            highest, total, out_even, out_odd = _attend(
                query_even, query_odd, even, odd, valid, highest, total, out_even, out_odd, logit_scale, FAST
            )

    if PARTS == 1:
        # Without keys and without a sink the sum is 0, and so is the output.
        scale = 2.0**SHIFT / tl.where(total > 0, total, 1.0)
        _write_rotated(
            out,
            out_even * scale[:, None],
            out_odd * scale[:, None],
            cos,
            sin,
            row,
            head,
            in_range,
            HEADS,
            HALF,
            PAIRS,
            FAST,
        )
    else:
        at = (row.to(tl.int64) * PARTS + part) * HEAD_BLOCK * tl.num_programs(2) + head
        tl.store(part_stats + 2 * at, highest)
        tl.store(part_stats + 2 * at + 1, total)
        target = at[:, None] * (2 * HALF) + columns[None, :]
        tl.store(part_out + target, out_even)
        tl.store(part_out + target + HALF, out_odd)


@triton.jit
def combine_parts_kernel(
    part_out,
    part_stats,
    sink,
    cos,
    sin,
    out,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PARTS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Add the parts of a row in their order, divide by the whole sum, turn back and store."""
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH)
    in_range = head < HEADS
    columns = tl.arange(0, HALF)
    sink_logit = tl.load(sink + head, mask=in_range, other=float("-inf")) * LOG2_E
    highest = tl.maximum(sink_logit, LOWEST)
    for part in tl.static_range(PARTS):
        at = (row.to(tl.int64) * PARTS + part) * HEAD_BLOCK + head
        highest = tl.maximum(highest, tl.load(part_stats + 2 * at))
    total = tl.exp2(sink_logit - highest)
    even = tl.zeros((HEADS_EACH, HALF), tl.float32)
    odd = tl.zeros((HEADS_EACH, HALF), tl.float32)
    for part in tl.static_range(PARTS):
        at = (row.to(tl.int64) * PARTS + part) * HEAD_BLOCK + head
        keep = tl.exp2(tl.load(part_stats + 2 * at) - highest)
        total += keep * tl.load(part_stats + 2 * at + 1)
        target = at[:, None] * (2 * HALF) + columns[None, :]
        even += keep[:, None] * tl.load(part_out + target)
        odd += keep[:, None] * tl.load(part_out + target + HALF)
    scale = 2.0**SHIFT / tl.where(total > 0, total, 1.0)
    _write_rotated(
        out, even * scale[:, None], odd * scale[:, None], cos, sin, row, head, in_range, HEADS, HALF, PAIRS, FAST
    )


def scratch(queries: Tensor, heads: int, parts: int) -> tuple[Tensor, Tensor]:
    """Memory for the outputs [rows, parts, heads, width] and the (highest, sum) of parts; nothing if there is one."""
    rows, _, width = queries.shape
    count = rows * parts if parts > 1 else 0
    return (
        torch.empty(count * heads * width, dtype=torch.float32, device=queries.device),
        torch.empty(count * heads * 2, dtype=torch.float32, device=queries.device),
    )


def combine_parts(
    part_out: Tensor,
    part_stats: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    out: Tensor,
    *,
    parts: int,
    heads: int,
    fast: bool,
) -> None:
    """Adds up what `parts` programs of each row left in their scratch memory, of `heads` heads each, into `out`."""
    rows, count, width = out.shape
    each = min(heads, 8)
    combine_parts_kernel[(rows, heads // each)](
        part_out,
        part_stats,
        sink,
        cos,
        sin,
        out,
        HEADS=count,
        HEAD_BLOCK=heads,
        HEADS_EACH=each,
        HALF=width // 2,
        PAIRS=cos.shape[1],
        PARTS=parts,
        FAST=fast,
        num_warps=4,
    )


def sparse_attention(
    queries: Tensor,
    window: Tensor,
    bases: Tensor,
    positions: Tensor,
    lowest: Tensor,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    ring: int,
    window_rows: int,
    scale: float,
    entries: Tensor | None,
    chosen: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """As `whalepod.kernels.sparse_attention`, for bfloat16 on a GPU, or anything in Triton's interpreter."""
    queries = queries.contiguous()
    rows, heads, width = queries.shape
    out = torch.empty_like(queries)
    if rows == 0:
        return out
    sizes = launch_sizes("sparse_attention", queries, rows=rows, shape=width, exact=batch_invariant)
    parts, fast = sizes["PARTS"], queries.is_cuda
    held = max(16, triton.next_power_of_2(heads))
    head_block = min(held, sizes["HEAD_BLOCK"])
    part_out, part_stats = scratch(queries, held, parts)
    sparse_attention_kernel[(rows, parts, held // head_block)](
        queries,
        window,
        bases,
        positions,
        lowest,
        window if entries is None else entries,
        bases if chosen is None else chosen,
        sink,
        cos,
        sin,
        out,
        part_out,
        part_stats,
        scale * 2.0**SHIFT.value * LOG2_E.value,
        ring,
        window_rows,
        0 if chosen is None else chosen.stride(0),
        HEADS=heads,
        HEAD_BLOCK=head_block,
        HALF=width // 2,
        PAIRS=cos.shape[1],
        KEYS=sizes["KEYS"],
        CHOSEN=0 if chosen is None else chosen.shape[1],
        PARTS=parts,
        FAST=fast,
        num_warps=sizes["num_warps"],
        num_stages=sizes["num_stages"],
    )
    if parts > 1:
        combine_parts(part_out, part_stats, sink, cos, sin, out, parts=parts, heads=held, fast=fast)
    return out
