"""How codes of cache records become bfloat16 by moving bits, as assembly that both kernels inline.

A code's bits, put into bfloat16's places, are a number too small by a fixed power of two; the multiplication with the
group's scale (which carries that power) makes it good. Two channels are done at once, one in each half of a register.
Both steps are exact.
"""

from __future__ import annotations

import triton.language as tl

SHIFT = tl.constexpr(24)
"""Keys are held times 2^-SHIFT, so that scale times correction stays within bfloat16 for FP4 and FP8 alike."""
FP8_EXPONENT = tl.constexpr(120)
"""E4M3 bits in bfloat16's places are too small by 2^120."""
FP4_EXPONENT = tl.constexpr(126)
"""E2M1 bits in bfloat16's places are too small by 2^126."""

UNPACK_FP8_ASM = tl.constexpr("""
{
.reg .b32 sign, even, odd;
shl.b32 sign, $2, 8;
shl.b32 even, $2, 4;
shr.u32 odd, $2, 4;
and.b32 even, even, 0x07F007F0;
and.b32 odd, odd, 0x07F007F0;
lop3.b32 even, sign, 0x80008000, even, 0xEA;
lop3.b32 odd, $2, 0x80008000, odd, 0xEA;
mul.rn.bf16x2 $0, even, $3;
mul.rn.bf16x2 $1, odd, $3;
}
""")
"""$2: two pairs of codes, even channel in the low byte; $3: their two scales -> $0: even channels, $1: odd channels."""

UNPACK_FP4_ASM = tl.constexpr("""
{
.reg .b32 near, far, a, b;
prmt.b32 near, $4, 0, 0x1404;
prmt.b32 far, $4, 0, 0x3424;
shl.b32 a, near, 4;
shr.u32 b, near, 2;
and.b32 b, b, 0x01C001C0;
lop3.b32 a, a, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, far, 4;
shr.u32 b, far, 2;
and.b32 b, b, 0x01C001C0;
lop3.b32 a, a, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $1, a, $6;
shr.u32 b, near, 6;
and.b32 b, b, 0x01C001C0;
lop3.b32 a, near, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $2, a, $5;
shr.u32 b, far, 6;
and.b32 b, b, 0x01C001C0;
lop3.b32 a, far, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $3, a, $6;
}
""")
"""$4: four bytes of two codes, even channel in the low nibble; $5, $6: their four scales -> $0, $1: even channels,
$2, $3: odd channels."""
