"""The best entries of each row in Triton, exactly, in three launches.

    histogram   every chunk of a row counts the first 11 bits of its scores
    collect     every chunk finds the digit that holds the count-th best score and keeps what is not below it
    finish      one program a row finds the exact score among what was kept, breaks ties by index, and sorts

What is kept is usually a few times `count`. If it outgrows its buffer (scores that are nearly all equal), the last step
searches the row itself: slow, and as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DIGITS = tl.constexpr(2048)
LOW_BITS = tl.constexpr(21)
NOTHING = tl.constexpr(-2147483648)
BEHIND = tl.constexpr(2147483647)


@triton.jit
def _ordered(scores):
    """float32 -> int32 of the same order; both zeros are one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def histogram_kernel(scores, stride, visible, counts, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    entry = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    seen = tl.load(visible + row)
    if tl.program_id(1) * CHUNK < seen:
        there = entry < seen
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride + entry, mask=there, other=0.0))
        found = tl.histogram((order >> LOW_BITS) + DIGITS // 2, DIGITS, mask=there)
        digit = tl.arange(0, DIGITS)
        tl.atomic_add(counts + row * (DIGITS + 1) + digit, found, mask=found > 0, sem="relaxed")


@triton.jit
def _digit_of(counts, row, COUNT: tl.constexpr):
    """The largest digit such that at least COUNT scores are not below it; 0 if there are fewer."""
    found = tl.load(counts + row * (DIGITS + 1) + tl.arange(0, DIGITS))
    not_below = tl.cumsum(found, 0, reverse=True)
    return tl.maximum(tl.sum((not_below >= COUNT).to(tl.int32), 0) - 1, 0)


@triton.jit
def collect_kernel(
    scores, stride, visible, counts, kept_orders, kept_entries, COUNT: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    entry = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    seen = tl.load(visible + row)
    if tl.program_id(1) * CHUNK < seen:
        there = entry < seen
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride + entry, mask=there, other=0.0))
        kept = there & ((order >> LOW_BITS) + DIGITS // 2 >= _digit_of(counts, row, COUNT))
        total = counts + row * (DIGITS + 1) + DIGITS
        place = tl.atomic_add(total + tl.zeros_like(entry), 1, mask=kept, sem="relaxed")
        kept = kept & (place < CAPACITY)
        tl.store(kept_orders + row * CAPACITY + place, order, mask=kept)
        tl.store(kept_entries + row * CAPACITY + place, entry, mask=kept)


@triton.jit
def finish_kernel(
    scores, stride, visible, counts, kept_orders, kept_entries, out, COUNT: tl.constexpr, CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    total = tl.load(counts + row * (DIGITS + 1) + DIGITS)
    target = out + row.to(tl.int64) * COUNT
    if total <= CAPACITY:
        slot = tl.arange(0, CAPACITY)
        there = slot < total
        order = tl.load(kept_orders + row * CAPACITY + slot, mask=there, other=NOTHING)
        entry = tl.load(kept_entries + row * CAPACITY + slot, mask=there, other=BEHIND)
        chosen = there
        if total > COUNT:
            last = (_digit_of(counts, row, COUNT) - DIGITS // 2) << LOW_BITS
            step = (total * 0 + 1) << LOW_BITS
            for bit in range(LOW_BITS):
                trial = last | (step >> (bit + 1))
                last = tl.where(tl.sum((order >= trial).to(tl.int32), 0) >= COUNT, trial, last)
            above = order > last
            equal = (order == last) & there
            room = COUNT - tl.sum(above.to(tl.int32), 0)
            newest = BEHIND
            if tl.sum(equal.to(tl.int32), 0) > room:
                # The least entry such that `room` of the equal ones are not beyond it.
                newest = room * 0
                step = (room * 0 + 1) << 30
                for bit in range(31):
                    trial = newest | (step >> bit)
                    newest = tl.where(tl.sum((equal & (entry < trial)).to(tl.int32), 0) < room, trial, newest)
            chosen = above | (equal & (entry <= newest))
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
        number = tl.sum(chosen.to(tl.int32), 0)
        tl.store(target + place, entry, mask=chosen)
        tl.debug_barrier()
        slot = tl.arange(0, COUNT)
        entry = tl.sort(tl.load(target + slot, mask=slot < number, other=BEHIND))
        tl.debug_barrier()
        tl.store(target + slot, tl.where(slot < number, entry, -1))
    else:
        _search_row(scores + row.to(tl.int64) * stride, tl.load(visible + row), target, COUNT, CHUNK)


@triton.jit
def _search_row(scores, seen, target, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Find the COUNT-th best score bit by bit over the whole row, then write in the order of entries."""
    lane = tl.arange(0, CHUNK)
    last = seen * 0 + NOTHING
    step = (seen * 0 + 1) << 30
    for bit in range(32):
        # The sign bit first: from the least number to 0.
        trial = tl.where(bit == 0, 0, last | (step >> (tl.maximum(bit, 1) - 1)))
        number = seen * 0
        for start in range(0, seen, CHUNK):
            there = start + lane < seen
            order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
            number += tl.sum((there & (order >= trial)).to(tl.int32), 0)
        last = tl.where(number >= COUNT, trial, last)
    above = seen * 0
    for start in range(0, seen, CHUNK):
        there = start + lane < seen
        order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
        above += tl.sum((there & (order > last)).to(tl.int32), 0)
    room = COUNT - above
    written = seen * 0
    for start in range(0, seen, CHUNK):
        there = start + lane < seen
        order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
        equal = there & (order == last)
        chosen = (there & (order > last)) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        tl.store(target + written + tl.cumsum(chosen.to(tl.int32), 0) - 1, start + lane, mask=chosen)
        room -= tl.sum(equal.to(tl.int32), 0)
        written += tl.sum(chosen.to(tl.int32), 0)


def top_entries(scores: Tensor, visible: Tensor, *, count: int, chunk: int = 4096, capacity: int | None = None) -> Tensor:
    """As `whalepod.kernels.top_entries`, on a GPU, or in Triton's interpreter; `count` a power of two."""
    rows, entries = scores.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    capacity = capacity or 4 * max(count, 512)
    counts = torch.zeros(rows, DIGITS.value + 1, dtype=torch.int32, device=scores.device)
    kept = torch.empty(2, rows, capacity, dtype=torch.int32, device=scores.device)
    grid = (rows, max(1, triton.cdiv(entries, chunk)))
    histogram_kernel[grid](scores, scores.stride(0), visible, counts, CHUNK=chunk, num_warps=8)
    sizes = {"COUNT": count, "CAPACITY": capacity, "CHUNK": chunk}
    collect_kernel[grid](scores, scores.stride(0), visible, counts, kept[0], kept[1], **sizes, num_warps=8)
    finish_kernel[(rows,)](scores, scores.stride(0), visible, counts, kept[0], kept[1], out, **sizes, num_warps=8)
    return out
