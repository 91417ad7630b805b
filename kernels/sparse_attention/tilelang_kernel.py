"""Attention over packed rows in TileLang: what the default kernels are compared with, written another way.

A program takes one query row, all heads at once. All its threads unpack a tile of 64 keys into shared memory, as
bfloat16 and in the order of the channels; both products read it there. The words of the next tile of chosen entries are
on their way meanwhile.
"""

import tilelang
import tilelang.language as T  # noqa: N812  the name that TileLang's own documents use
import torch
from torch import Tensor

from .unpacking import FP4_EXPONENT, FP8_EXPONENT, SHIFT

KEYS = 64
"""Keys of a tile."""
THREADS = 256
CHANNELS = 16
"""That a thread unpacks at once."""
LOG2_E = 1.4426950408889634
LOWEST = -1e30

UNPACK = f"""
// {CHANNELS} channels a call, two at a time. A code's bits, put into bfloat16's places, are a number too small by a
// power of two, which the scale carries.
__device__ __forceinline__ unsigned times(unsigned pair, unsigned scales) {{
  unsigned product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scales));
  return product;
}}
__device__ __forceinline__ void unpack_fp4(const unsigned* codes, unsigned scale, void* out) {{
  float wide = __uint_as_float(scale << 20) * 0x1p120f * 0x1p{FP4_EXPONENT.value - SHIFT.value}f;
  unsigned scales = __float_as_uint(wide) >> 16;
  scales |= scales << 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {{
    unsigned codes_of_two = (codes[i / 4] >> 8 * (i % 4) & 0xFF) * 0x10010;
    ((unsigned*)out)[i] = times((codes_of_two << 8 & 0x80008000) | (codes_of_two << 2 & 0x01C001C0), scales);
  }}
}}
__device__ __forceinline__ void unpack_fp8(const unsigned* codes, unsigned scale, void* out) {{
  unsigned scales = min(scale + {FP8_EXPONENT.value - SHIFT.value}, 254u) << 7;
  scales |= scales << 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {{
    unsigned codes_of_two = __byte_perm(codes[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
    ((unsigned*)out)[i] = times((codes_of_two & 0x80008000) | (codes_of_two >> 4 & 0x07F007F0), scales);
  }}
}}
"""


@T.macro
def _store_piece(piece, unpacked, keys):
    """16 channels of a key."""
    groups = keys.shape[1] // CHANNELS
    for part in T.unroll(2):
        for i in T.vectorized(8):
            keys[piece // groups, piece % groups * CHANNELS + part * 8 + i] = unpacked[part * 8 + i]


@T.macro
def _attend(keys, logits, weights, highest, before, keep, tile_sum, total, sums):
    """One tile of the running softmax, in powers of two; `logits` are masked and scaled."""
    heads, width = sums.shape
    T.copy(highest, before)
    T.reduce_max(logits, highest, dim=1, clear=False)
    for head in T.Parallel(heads):
        keep[head] = T.exp2(before[head] - highest[head])
    for head, key in T.Parallel(heads, KEYS):
        logits[head, key] = T.exp2(logits[head, key] - highest[head])
    T.reduce_sum(logits, tile_sum, dim=1)
    for head in T.Parallel(heads):
        total[head] = total[head] * keep[head] + tile_sum[head]
    T.copy(logits, weights)
    for head, channel in T.Parallel(heads, width):
        sums[head, channel] = sums[head, channel] * keep[head]
    T.gemm(weights, keys, sums, policy=T.GemmWarpPolicy.FullCol)


@tilelang.jit
def program(*, heads: int, width: int, pairs: int, window_rows: int, chosen_count: int) -> "T.PrimFunc":
    """The program for these sizes, any number of rows and any pools."""
    half, groups = width // 2, width // CHANNELS
    pieces = KEYS * groups // THREADS
    window_words, entry_words = (width + width // 32) // 4, (width // 2 + groups) // 4
    rows, window_pool, entry_pool = T.dynamic("rows, window_pool, entry_pool")
    bf16, f32, i32, u32 = "bfloat16", "float32", "int32", "uint32"
    by_column = T.GemmWarpPolicy.FullCol

    @T.macro
    def fetch_entries(entries, chosen, row, tile, codes, scales):
        """What this thread unpacks of a tile of chosen entries; zeros where there are none."""
        thread = T.get_thread_binding()
        for i in T.unroll(pieces):
            key, group = (i * THREADS + thread) // groups, thread % groups
            place = chosen[row, tile * KEYS + key]
            scales[i] = 0
            for word in T.vectorized(2):
                codes[i * 2 + word] = 0
            if place >= 0:
                for word in T.vectorized(2):
                    codes[i * 2 + word] = entries[place, group * 2 + word]
                scales[i] = entries[place, groups * 2 + group // 4] >> T.cast(group % 4 * 8, u32) & T.uint32(255)

    @T.prim_func
    def sparse_attention(
        queries: T.Tensor((rows, heads, width), bf16),
        window: T.Tensor((window_pool, window_words), u32),
        bases: T.Tensor((rows,), i32),
        positions: T.Tensor((rows,), i32),
        lowest: T.Tensor((rows,), i32),
        entries: T.Tensor((entry_pool, entry_words), u32),
        chosen: T.Tensor((rows, max(chosen_count, 1)), i32),
        sink: T.Tensor((heads,), f32),
        cos: T.Tensor((rows, pairs), f32),
        sin: T.Tensor((rows, pairs), f32),
        out: T.Tensor((rows, heads, width), bf16),
        logit_scale: T.float32,
        ring: T.int32,
    ):
        with T.Kernel(rows, threads=THREADS, prelude=UNPACK) as row:
            query = T.alloc_shared((heads, width), bf16)
            keys = T.alloc_shared((KEYS, width), bf16)
            weights = T.alloc_shared((heads, KEYS), bf16)
            logits = T.alloc_fragment((heads, KEYS), f32)
            sums = T.alloc_fragment((heads, width), f32)
            highest, before, keep, tile_sum, total = (T.alloc_fragment((heads,), f32) for _ in range(5))
            unpacked = T.alloc_local((CHANNELS,), bf16)
            window_codes = T.alloc_local((4,), u32)
            codes = T.alloc_local((pieces * 2,), u32)
            scales = T.alloc_local((pieces,), u32)
            thread = T.get_thread_binding()

            for head, pair in T.Parallel(heads, half):
                even, odd = T.cast(queries[row, head, 2 * pair], f32), T.cast(queries[row, head, 2 * pair + 1], f32)
                angle = T.max(pair - (half - pairs), 0)
                c = T.if_then_else(pair >= half - pairs, cos[row, angle], T.float32(1))
                s = T.if_then_else(pair >= half - pairs, sin[row, angle], T.float32(0))
                query[head, 2 * pair] = T.cast(even * c - odd * s, bf16)
                query[head, 2 * pair + 1] = T.cast(odd * c + even * s, bf16)
            for head in T.Parallel(heads):
                highest[head] = T.max(sink[head] * LOG2_E, LOWEST)
                total[head] = T.exp2(sink[head] * LOG2_E - highest[head])
            T.clear(sums)

            first = positions[row] - (window_rows - 1)
            first_seen = T.max(lowest[row], 0)
            for tile in T.serial(T.ceildiv(window_rows, KEYS)):
                for i in T.unroll(pieces):
                    key, group = (i * THREADS + thread) // groups, thread % groups
                    at = first + tile * KEYS + key
                    for word in T.vectorized(4):
                        window_codes[word] = 0
                    scale = T.alloc_var(u32, init=0)
                    if (at >= first_seen) & (at <= positions[row]):
                        place = bases[row] + at % ring
                        for word in T.vectorized(4):
                            window_codes[word] = window[place, group * 4 + word]
                        shift = T.cast(group // 2 % 4 * 8, u32)
                        scale = window[place, groups * 4 + group // 8] >> shift & T.uint32(255)
                    T.call_extern(
                        "handle", "unpack_fp8", T.address_of(window_codes[0]), scale, T.address_of(unpacked[0])
                    )
                    _store_piece(i * THREADS + thread, unpacked, keys)
                T.gemm(query, keys, logits, transpose_B=True, clear_accum=True, policy=by_column)
                for head, key in T.Parallel(heads, KEYS):
                    at = first + tile * KEYS + key
                    logits[head, key] = T.if_then_else(
                        (at >= first_seen) & (at <= positions[row]),
                        logits[head, key] * logit_scale,
                        -T.infinity(f32),
                    )
                _attend(keys, logits, weights, highest, before, keep, tile_sum, total, sums)

            if chosen_count > 0:
                fetch_entries(entries, chosen, row, 0, codes, scales)
                for tile in T.serial(chosen_count // KEYS):
                    if chosen[row, tile * KEYS] >= 0:
                        for i in T.unroll(pieces):
                            T.call_extern(
                                "handle", "unpack_fp4", T.address_of(codes[i * 2]), scales[i], T.address_of(unpacked[0])
                            )
                            _store_piece(i * THREADS + thread, unpacked, keys)
                        if tile + 1 < chosen_count // KEYS:
                            fetch_entries(entries, chosen, row, tile + 1, codes, scales)
                        T.gemm(query, keys, logits, transpose_B=True, clear_accum=True, policy=by_column)
                        for head, key in T.Parallel(heads, KEYS):
                            logits[head, key] = T.if_then_else(
                                chosen[row, tile * KEYS + key] >= 0,
                                logits[head, key] * logit_scale,
                                -T.infinity(f32),
                            )
                        _attend(keys, logits, weights, highest, before, keep, tile_sum, total, sums)

            # Without keys and without a sink the sum is 0, and so is the output.
            for head, channel in T.Parallel(heads, width):
                sums[head, channel] = T.if_then_else(
                    total[head] > 0, sums[head, channel] * 2.0**SHIFT.value / total[head], T.float32(0)
                )
            T.copy(sums, query)
            for head, pair in T.Parallel(heads, half):
                even, odd = T.cast(query[head, 2 * pair], f32), T.cast(query[head, 2 * pair + 1], f32)
                angle = T.max(pair - (half - pairs), 0)
                c = T.if_then_else(pair >= half - pairs, cos[row, angle], T.float32(1))
                s = T.if_then_else(pair >= half - pairs, sin[row, angle], T.float32(0))
                out[row, head, 2 * pair] = T.cast(even * c + odd * s, bf16)
                out[row, head, 2 * pair + 1] = T.cast(odd * c - even * s, bf16)

    return sparse_attention


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
) -> Tensor:
    """As `whalepod.kernels.sparse_attention`, for bfloat16 on a GPU; as many chosen places as fill tiles of 64."""
    queries = queries.contiguous()
    rows, heads, width = queries.shape
    out = torch.empty_like(queries)
    if rows == 0:
        return out
    count = 0 if chosen is None else chosen.shape[1]
    assert count % KEYS == 0, f"{count} chosen places fill no whole tiles of {KEYS}"
    run = program(heads=heads, width=width, pairs=cos.shape[1], window_rows=window_rows, chosen_count=count)
    run(
        queries,
        window.view(torch.uint32),
        bases,
        positions,
        lowest,
        entries.view(torch.uint32)
        if entries is not None
        else torch.zeros(1, (width // 2 + width // CHANNELS) // 4, dtype=torch.uint32, device=queries.device),
        chosen if chosen is not None else bases[:, None],
        sink,
        cos,
        sin,
        out,
        scale * 2.0**SHIFT.value * LOG2_E,
        ring,
    )
    return out
