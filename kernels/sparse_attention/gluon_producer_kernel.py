"""The half of Hopper's attention that brings keys: fetches packed records and fills the ring with bfloat16 tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .unpacking import FP4_EXPONENT, FP8_EXPONENT, SHIFT, UNPACK_FP4_ASM, UNPACK_FP8_ASM

PRODUCER_WARPS = gl.constexpr(8)
KEYS = gl.constexpr(64)
"""Keys of a tile."""

# A tensor a line would hide what the code does with them.
# fmt: off


@gluon.jit
def _load_fp8(records, rows, count, ROWS: gl.constexpr, HALF: gl.constexpr):
    """Raw pairs of codes [ROWS, HALF] int16 and scale bytes [ROWS, HALF // 16] of rows; those from `count` on are 0."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [PRODUCER_WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = 2 * HALF + HALF // 16
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    start = rows.to(gl.int64) * BYTES
    words = gl.load(
        (records + gl.multiple_of(start, 16)[:, None]).to(gl.pointer_type(gl.int16), bitcast=True) + columns[None, :],
        mask=(keys < count)[:, None], other=0,
    )
    groups: gl.constexpr = gl.SliceLayout(2, grouped)
    group = gl.arange(0, HALF // 16, gl.SliceLayout(0, groups))
    key = gl.arange(0, ROWS, gl.SliceLayout(1, groups))
    base = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True)
    scales = gl.load(records + base[:, None] + (2 * HALF + group)[None, :], mask=(key < count)[:, None], other=0)
    return words, scales


@gluon.jit
def _unpack_fp8(words, scale_bytes):
    ROWS: gl.constexpr = words.shape[0]
    HALF: gl.constexpr = words.shape[1]
    exponents = gl.minimum(scale_bytes.to(gl.int32) + (FP8_EXPONENT - SHIFT), 254)
    scales = (exponents << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    spread = gl.expand_dims(scales, 2).broadcast_to((ROWS, HALF // 16, 16)).reshape((ROWS, HALF))
    spread = gl.convert_layout(spread, words.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        UNPACK_FP8_ASM, "=r,=r,r,r", [words, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)


@gluon.jit
def _load_fp4(records, rows, count, ROWS: gl.constexpr, HALF: gl.constexpr):
    """Raw codes, two a byte [ROWS, HALF], and scale bytes [ROWS, HALF // 8] of rows; those from `count` on are 0."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    grouped: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32, 1], [PRODUCER_WARPS, 1, 1], [2, 1, 0])
    BYTES: gl.constexpr = HALF + HALF // 8
    keys = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    columns = gl.arange(0, HALF, gl.SliceLayout(0, flat))
    start = rows.to(gl.int64) * BYTES
    codes = gl.load(
        records.to(gl.pointer_type(gl.int8), bitcast=True) + gl.multiple_of(start, 16)[:, None] + columns[None, :],
        mask=(keys < count)[:, None],
        other=0,
    )
    groups: gl.constexpr = gl.SliceLayout(2, grouped)
    group = gl.arange(0, HALF // 8, gl.SliceLayout(0, groups))
    key = gl.arange(0, ROWS, gl.SliceLayout(1, groups))
    base = gl.convert_layout(start, gl.SliceLayout(1, groups), assert_trivial=True)
    scales = gl.load(records + base[:, None] + (HALF + group)[None, :], mask=(key < count)[:, None], other=0)
    return codes, scales


@gluon.jit
def _unpack_fp4(codes, scale_bytes):
    ROWS: gl.constexpr = codes.shape[0]
    HALF: gl.constexpr = codes.shape[1]
    scales = scale_bytes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * 2.0 ** (FP4_EXPONENT - SHIFT)
    scales = scales.to(gl.bfloat16)
    spread = gl.expand_dims(scales, 2).broadcast_to((ROWS, HALF // 8, 8)).reshape((ROWS, HALF))
    spread = gl.convert_layout(spread, codes.type.layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        UNPACK_FP4_ASM, "=r,=r,=r,=r,r,r,r", [codes, spread], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4)


@gluon.jit
def _put(evens, odds, stage, start, even, odd):
    """Store rows `start` … of a tile, where its channels are even and odd."""
    evens.index(stage).slice(start, even.shape[0], 0).store(even)
    odds.index(stage).slice(start, odd.shape[0], 0).store(odd)


@gluon.jit
def _produce_window(evens, odds, filled, emptied, window, base, ring, at, count, turn, HALF: gl.constexpr):
    """Fill a tile with the window rows of positions at, at + 1, …, half of them at a time for want of registers."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    EACH: gl.constexpr = KEYS // 2
    key = gl.arange(0, EACH, gl.SliceLayout(1, flat))
    words, scales = _load_fp8(window, base + (at + key) % ring, count, EACH, HALF)
    stage = turn % 2
    mbarrier.wait(emptied.index(stage), ((turn // 2) & 1) ^ 1)
    even, odd = _unpack_fp8(words, scales)
    words, scales = _load_fp8(window, base + (at + EACH + key) % ring, count - EACH, EACH, HALF)
    _put(evens, odds, stage, 0, even, odd)
    even, odd = _unpack_fp8(words, scales)
    _put(evens, odds, stage, EACH, even, odd)
    fence_async_shared()
    mbarrier.arrive(filled.index(stage), count=1)


@gluon.jit
def _chosen_rows(chosen_row, begin, entry_count, ROWS: gl.constexpr):
    """Places in the pool of chosen entries begin, begin + 1, …; 0 beyond the last."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [PRODUCER_WARPS, 1], [1, 0])
    place = begin + gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    return gl.load(chosen_row + place, mask=place < entry_count, other=0)


@gluon.jit
def _produce_chosen(
    evens, odds, filled, emptied, entries, chosen_row, entry_count, tile_start, tile_end, turn, HALF: gl.constexpr
):
    """Fill tiles with chosen entries. The places of the next tile's are on their way while one is unpacked."""
    EACH: gl.constexpr = KEYS // 2
    rows_0 = _chosen_rows(chosen_row, tile_start * KEYS, entry_count, EACH)
    rows_1 = _chosen_rows(chosen_row, tile_start * KEYS + EACH, entry_count, EACH)
    for tile in range(tile_start, tile_end):
        count = entry_count - tile * KEYS
        codes_0, scales_0 = _load_fp4(entries, rows_0, count, EACH, HALF)
        codes_1, scales_1 = _load_fp4(entries, rows_1, count - EACH, EACH, HALF)
        rows_0 = _chosen_rows(chosen_row, (tile + 1) * KEYS, entry_count, EACH)
        rows_1 = _chosen_rows(chosen_row, (tile + 1) * KEYS + EACH, entry_count, EACH)
        stage = turn % 2
        mbarrier.wait(emptied.index(stage), ((turn // 2) & 1) ^ 1)
        even, odd = _unpack_fp4(codes_0, scales_0)
        _put(evens, odds, stage, 0, even, odd)
        even, odd = _unpack_fp4(codes_1, scales_1)
        _put(evens, odds, stage, EACH, even, odd)
        fence_async_shared()
        mbarrier.arrive(filled.index(stage), count=1)
        turn += 1
    return turn


@gluon.jit
def _prefetch(pointers, wanted):
    """Ask for the cache lines of `pointers` where `wanted`, so that fetching them later finds them in the L2 cache."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
        [pointers, wanted.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _prefetch_item(
    queries, entries, chosen, chosen_stride, item, items, HEADS: gl.constexpr, HALF: gl.constexpr, CHOSEN: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Queries and all chosen records of an item's row."""
    row = item // PARTS
    QUERY_LINES: gl.constexpr = HEADS * HALF * 4 // 128
    line = gl.arange(0, QUERY_LINES, gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
    _prefetch(queries + row.to(gl.int64) * (2 * HEADS * HALF) + 64 * line, (line >= 0) & (item < items))
    if CHOSEN > 0:
        place = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [PRODUCER_WARPS], [0]))
        rows = gl.load(chosen + row.to(gl.int64) * chosen_stride + place, mask=(place >= 0) & (item < items), other=-1)
        start = gl.maximum(rows, 0).to(gl.int64) * (HALF + HALF // 8)
        for part in gl.static_range((HALF + HALF // 8 + 127) // 128):
            _prefetch(entries + start + 128 * part, rows >= 0)


@gluon.jit
def produce(
    queries, window, bases, positions, lowest, entries, chosen, evens, odds, filled, emptied, ring, window_rows,
    chosen_stride, items, HEADS: gl.constexpr, HALF: gl.constexpr, CHOSEN: gl.constexpr, PARTS: gl.constexpr,
):
    turn = gl.program_id(0) * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        row = item // PARTS
        chosen_row = chosen + row.to(gl.int64) * chosen_stride
        position = gl.load(positions + row)
        first = gl.maximum(position - window_rows + 1, gl.load(lowest + row))
        base = gl.load(bases + row)
        if item < gl.num_programs(0):
            _prefetch_item(queries, entries, chosen, chosen_stride, item, items, HEADS, HALF, CHOSEN, PARTS)
        window_tiles, entry_count, pair_start, pair_end = extent(
            chosen_row, first, position, item % PARTS, CHOSEN, PARTS)
        window_end = 2 * pair_end
        if CHOSEN > 0:
            window_end = gl.minimum(window_end, window_tiles)
        for tile in range(2 * pair_start, window_end):
            at = first + tile * KEYS
            _produce_window(evens, odds, filled, emptied, window, base, ring, at, position + 1 - at, turn, HALF)
            turn += 1
        _prefetch_item(
            queries, entries, chosen, chosen_stride, item + gl.num_programs(0), items, HEADS, HALF, CHOSEN, PARTS)
        if CHOSEN > 0:
            start = gl.maximum(2 * pair_start, window_tiles)
            turn = _produce_chosen(
                evens, odds, filled, emptied, entries, chosen_row, entry_count, start - window_tiles,
                2 * pair_end - window_tiles, turn, HALF)


@gluon.jit
def extent(chosen_row, first, position, part, CHOSEN: gl.constexpr, PARTS: gl.constexpr):
    """Tiles of the window, number of chosen entries, and the pairs of tiles that this part of the row's keys is."""
    window_tiles = gl.cdiv(position + 1 - first, KEYS)
    entry_count = position * 0
    if CHOSEN > 0:
        places = gl.arange(0, CHOSEN, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        entry_count = gl.sum((gl.load(chosen_row + places) >= 0).to(gl.int32), 0)
    pairs = gl.cdiv(window_tiles + gl.cdiv(entry_count, KEYS), 2)
    return window_tiles, entry_count, part * pairs // PARTS, (part + 1) * pairs // PARTS
