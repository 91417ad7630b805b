"""Packed number formats of cache records: groups of small floats, each with a scale.

A record is its codes followed by its scales, all bytes. FP4 packs two codes a byte, the even channel in the low
nibble. Rounding is to nearest, ties to even; a value beyond the range saturates.
"""

from .reference import FP4_BLOCK16, FP8_BLOCK32, MXFP4_BLOCK32, PackedFormat

__all__ = ["FP4_BLOCK16", "FP8_BLOCK32", "MXFP4_BLOCK32", "PackedFormat"]
