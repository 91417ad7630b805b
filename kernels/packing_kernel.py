"""Rounding and packing that several Triton kernels share. Everything is bit for bit what the plain versions do."""

from __future__ import annotations

import triton
import triton.language as tl


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
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return x


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
    return _nearest(x, 121, 3)


@triton.jit
def e2m1_nearest(x):
    """float32 within ±6 -> the nearest E2M1 number; a middle belongs to the one whose code is even."""
    return _nearest(x, 127, 1)


@triton.jit
def e4m3_bytes(x):
    """float32 within ±448 -> E4M3 codes, to nearest, ties to even."""
    # With its exponent 120 smaller, a number has its code's bits in float32's places, be it subnormal or not.
    bits = (e4m3_nearest(x) * 2.0**-120).to(tl.int32, bitcast=True)
    return (((bits >> 20) & 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_values(codes):
    """E4M3 codes of numbers that are not negative, int32 -> float32."""
    # Shifted into place the exponent is 120 too small; of subnormal codes that is the whole story.
    return (codes << 20).to(tl.float32, bitcast=True) * 2.0**60 * 2.0**60


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
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


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
def load_pairs(base, at, mask):
    """Channels at, at + 1 of numbers in memory -> even, odd float32; `at` even. bfloat16 comes in words of two."""
    if base.dtype.element_ty == tl.bfloat16:
        words = tl.load((base.to(tl.pointer_type(tl.int32))) + at // 2, mask=mask, other=0)
        return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
    else:
        return (
            tl.load(base + at, mask=mask, other=0.0).to(tl.float32),
            tl.load(base + at + 1, mask=mask, other=0.0).to(tl.float32),
        )


@triton.jit
def store_pairs(base, at, even, odd, mask):
    """The other way; `even` and `odd` float32 that are numbers of the dtype there."""
    if base.dtype.element_ty == tl.bfloat16:
        low = (even.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        words = low | (odd.to(tl.int32, bitcast=True) & -65536)
        tl.store((base.to(tl.pointer_type(tl.int32))) + at // 2, words, mask=mask)
    else:
        tl.store(base + at, even, mask=mask)
        tl.store(base + at + 1, odd, mask=mask)
