"""Rounding and packing that several Triton kernels share. Everything is bit for bit what the plain versions do.

A chip has instructions that round to bfloat16 and to E4M3. Triton's interpreter, which runs kernels on a CPU in tests,
cuts off in their place: there the same is done with whole numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ON_CHIP = tl.constexpr(not triton.knobs.runtime.interpret)
EARLY_PROGRAMS_MAX = 4096
"""Each program's word that the next kernel may come takes half a nanosecond, one after the other, on an H200; to come
early saves some 0.5 µs."""


@triton.jit
def begin_early(EARLY: tl.constexpr):
    """Of a kernel that is launched with `launch_pdl=EARLY`, while the one before it still runs: lets the one behind it
    come as early, and waits until all that was launched before has ended. Behind it a kernel may read what others have
    written, and write; before it, it reads what is older than the kernel ahead: weights, places and angles."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def comes_early(x: Tensor, programs: int) -> bool:
    """Whether a kernel of so many programs on the device of `x` is best launched while the one before it runs."""
    return x.is_cuda and programs <= EARLY_PROGRAMS_MAX


def chunk_of(width: int) -> int:
    """The power of two of channels that a row of `width` is held in pieces of: up to 1,024, and of those that which
    leaves least of the last piece empty."""
    if width <= 1024:
        return max(32, triton.next_power_of_2(width))
    return min((1024, 512, 256), key=lambda size: (-width % size, -size))


@triton.jit
def rounded(x, dtype):
    """float32 as the nearest number of `dtype`, bfloat16 or float32."""
    if dtype == tl.bfloat16:
        if ON_CHIP:
            # Two at a time: one alone takes an instruction of a quarter of the speed.
            x = tl.inline_asm_elementwise(
                """{
                .reg .b32 both, one;
                cvt.rn.bf16x2.f32 both, $3, $2;
                shl.b32 one, both, 16;
                mov.b32 $0, one;
                and.b32 one, both, 0xFFFF0000;
                mov.b32 $1, one;
                }""",
                "=f,=f,f,f",
                [x],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        else:
            bits = x.to(tl.int32, bitcast=True)
            x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrowed(x, dtype):
    """float32 -> the nearest number of `dtype`, bfloat16 or float32, as `dtype`."""
    return x.to(dtype) if ON_CHIP else rounded(x, dtype).to(dtype)


@triton.jit
def _nearest(x, EXPONENT_MIN: tl.constexpr, BITS: tl.constexpr):
    """float32 -> the nearest number of BITS bits behind the first, ties to even; numbers whose exponent byte is below
    EXPONENT_MIN have no more places than those that have it."""
    bits = x.to(tl.int32, bitcast=True)
    binade = tl.maximum(bits & 0x7F800000, EXPONENT_MIN << 23).to(tl.float32, bitcast=True)
    # As far up as this, float32 has just these places left: the sum is rounded to them.
    far = binade * (1.5 * 2.0 ** (23 - BITS))
    size = (x + far) - far
    return (size.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_nearest(x):
    """float32 within ±448 -> the nearest E4M3 number, ties to even."""
    return x.to(tl.float8e4nv).to(tl.float32) if ON_CHIP else _nearest(x, 121, 3)


@triton.jit
def e2m1_nearest(x):
    """float32 within ±6 -> the nearest E2M1 number; a middle belongs to the one whose code is even."""
    return _nearest(x, 127, 1)


@triton.jit
def e4m3_bytes(x):
    """float32 within ±448 -> E4M3 codes, to nearest, ties to even. To be stored as bytes: where they were widened to 16
    bits and put together, the assembler of CUDA 12.8 took a wrong register for one in eight."""
    if ON_CHIP:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # With its exponent 120 smaller, a number has its code's bits in float32's places, be it subnormal or not.
        bits = (e4m3_nearest(x) * 2.0**-120).to(tl.int32, bitcast=True)
        return (((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """E4M3 codes of numbers that are not negative, int32 -> float32."""
    # Shifted into place the exponent is 120 too small; of subnormal codes that is the whole story.
    return (codes << 20).to(tl.float32, bitcast=True) * 2.0**60 * 2.0**60


@triton.jit
def reciprocal(x):
    """1 / x of a normal float32, to within a unit in its last place."""
    if ON_CHIP:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), within 1e-6 of it."""
    if ON_CHIP:
        return tl.inline_asm_elementwise(
            """{
            mul.f32 $0, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 $0, $0;
            add.f32 $0, $0, 0f3F800000;
            rcp.approx.ftz.f32 $0, $0;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def power_of_two_exponent(target):
    """Exponent byte of the smallest power of two that is not below `target`, a normal float32."""
    return (target.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23


@triton.jit
def power_of_two(exponent):
    """float32 of an exponent byte."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_codes(x):
    """float32 within ±6 -> codes 0 … 15, to nearest; a middle belongs to the even one of its two codes."""
    # As in `e4m3_bytes`.
    bits = (e2m1_nearest(x) * 2.0**-126).to(tl.int32, bitcast=True)
    return ((bits >> 22) & 7) | ((bits >> 28) & 8)


@triton.jit
def e2m1_pairs(even, odd):
    """float32, quotients of bfloat16 numbers and of scales of at most four bits -> bytes of two E2M1 codes each, int32;
    beyond ±6 they saturate."""
    if ON_CHIP:
        # Such a quotient is a middle between two codes or at least 2^-9 of itself away: in float16, two at a time, it
        # stays on its side. Half a binade is the unit of the last place that is left at 1.5 · 2^9 times the binade, and
        # the sum's low bits count the halves: of 0, 2 and 4 on by binades of 1, 2 and 4.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 x, size, binade, sum, one, six;
            mov.b32 one, 0x3C003C00;
            mov.b32 six, 0x46004600;
            cvt.rn.f16x2.f32 x, $2, $1;
            and.b32 size, x, 0x7FFF7FFF;
            min.f16x2 size, size, six;
            and.b32 binade, size, 0x7C007C00;
            max.f16x2 binade, binade, one;
            add.u32 sum, binade, 0x26002600;
            add.rn.f16x2 sum, sum, size;
            shr.u32 binade, binade, 9;
            add.u32 sum, sum, binade;
            add.u32 sum, sum, 0x00020002;
            and.b32 sum, sum, 0x00070007;
            shr.u32 x, x, 12;
            and.b32 x, x, 0x00080008;
            or.b32 sum, sum, x;
            shr.u32 x, sum, 12;
            or.b32 $0, sum, x;
            }""",
            "=r,f,f",
            [even, odd],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return e2m1_codes(tl.clamp(even, -6.0, 6.0)) | (e2m1_codes(tl.clamp(odd, -6.0, 6.0)) << 4)


@triton.jit
def e2m1_values(codes):
    """Codes 0 … 15, int32 -> float32."""
    size = ((codes & 7) << 22).to(tl.float32, bitcast=True) * 2.0**63 * 2.0**63
    return tl.where((codes & 8) != 0, -size, size)


@triton.jit
def group_maxima(even, odd, ROWS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """even, odd [ROWS, HALF] channels -> largest magnitude of every GROUP channels [ROWS, 2 · HALF / GROUP]."""
    largest = tl.maximum(tl.abs(even), tl.abs(odd)).reshape(ROWS, 2 * HALF // GROUP, GROUP // 2)
    return tl.max(largest, 2)


@triton.jit
def spread_groups(values, ROWS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS, 2 · HALF / GROUP] -> each group's value at its even (or odd) channels [ROWS, HALF]."""
    GROUPS: tl.constexpr = 2 * HALF // GROUP
    return tl.broadcast_to(values[:, :, None], (ROWS, GROUPS, GROUP // 2)).reshape(ROWS, HALF)


@triton.jit
def load_pairs(base, pair, mask):
    """Channels 2 · pair and 2 · pair + 1 of bfloat16 or float32 in memory -> even, odd float32. Both of a pair come as
    one word, so that neighbours come in vectors."""
    if base.dtype.element_ty == tl.bfloat16:
        words = tl.load(base.to(tl.pointer_type(tl.int32)) + pair, mask=mask, other=0)
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        words = tl.load(base.to(tl.pointer_type(tl.int64)) + pair, mask=mask, other=0)
        return words.to(tl.int32).to(tl.float32, bitcast=True), (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_pairs(base, pair, even, odd, mask):
    """The other way; `even` and `odd` float32 that are numbers of the dtype there."""
    if base.dtype.element_ty == tl.bfloat16:
        low = (even.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        words = low | (odd.to(tl.int32, bitcast=True) & -65536)
        tl.store(base.to(tl.pointer_type(tl.int32)) + pair, words, mask=mask)
    else:
        tl.store(base + 2 * pair, even, mask=mask)
        tl.store(base + 2 * pair + 1, odd, mask=mask)
