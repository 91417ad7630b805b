"""The best entries of each row in Triton, exactly, in four launches.

    maxima      the best score of every few consecutive entries
    bound       the count-th best of those: at least `count` scores are not below it, and not many more
    collect     keeps the scores that are not below the bound, out of the groups whose best is not
    finish      one program a row finds the exact score among what was kept, breaks ties by index, and sorts

If more is kept than its buffer holds (scores that are nearly all equal), the last step searches the row itself: slow,
and as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BOUND_BITS = tl.constexpr(20)
"""Leading bits of the bound that are searched; the others are 0, which keeps a few scores more."""
NOTHING = tl.constexpr(-2147483648)
BEHIND = tl.constexpr(2147483647)
GROUPS_EACH = 8
"""For each wanted entry, at most, but in rows so long that groups are as large as they get."""


@triton.jit
def _ordered(scores):
    """float32 -> int32 of the same order; both zeros are one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best(orders, count, steps):
    """The largest order with its first `steps` bits free and the others 0 that at least `count` of `orders` reach."""
    best = count * 0 + NOTHING
    step = (count * 0 + 1) << 30
    for bit in range(steps):
        # The sign bit first: from the least number to 0.
        trial = tl.where(bit == 0, 0, best | (step >> (tl.maximum(bit, 1) - 1)))
        best = tl.where(tl.sum((orders >= trial).to(tl.int32), 0) >= count, trial, best)
    return best


@triton.jit
def maxima_kernel(scores, stride, visible, maxima, groups, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    group = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    entry = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = entry < tl.load(visible + row)
    order = _ordered(tl.load(scores + row.to(tl.int64) * stride + entry, mask=there, other=0.0))
    order = tl.max(tl.where(there, order, NOTHING), 1)
    tl.store(maxima + row.to(tl.int64) * groups + group, order, mask=group < groups)


@triton.jit
def bound_kernel(maxima, groups, bounds, kept_counts, COUNT: tl.constexpr, GROUPS: tl.constexpr):
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    order = tl.load(maxima + row.to(tl.int64) * groups + group, mask=group < groups, other=NOTHING)
    tl.store(bounds + row, _best(order, row * 0 + COUNT, BOUND_BITS))
    tl.store(kept_counts + row, 0)


@triton.jit
def collect_kernel(
    scores,
    stride,
    visible,
    maxima,
    groups,
    bounds,
    kept_counts,
    kept_orders,
    kept_entries,
    good_groups,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, part) lists which of its CHUNK groups reach the bound, then reads those, TILE at a time."""
    row = tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    group = first + tl.arange(0, CHUNK)
    bound = tl.load(bounds + row)
    best = tl.load(maxima + row.to(tl.int64) * groups + group, mask=group < groups, other=NOTHING)
    good = (best >= bound) & (best > NOTHING)
    listed = good_groups + row.to(tl.int64) * groups + first
    tl.store(listed + tl.cumsum(good.to(tl.int32), 0) - 1, group, mask=good)
    tl.debug_barrier()
    number = tl.sum(good.to(tl.int32), 0)
    seen = tl.load(visible + row)
    for start in range(0, number, TILE):
        slot = start + tl.arange(0, TILE)
        wanted = tl.load(listed + slot, mask=slot < number, other=0)
        entry = wanted[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        there = (slot < number)[:, None] & (entry < seen)
        order = _ordered(tl.load(scores + row.to(tl.int64) * stride + entry, mask=there, other=0.0))
        kept = there & (order >= bound)
        # One place in the buffer for all that a tile keeps; within it in order.
        each = tl.sum(kept.to(tl.int32), 1)
        place = tl.atomic_add(kept_counts + row, tl.sum(each, 0), sem="relaxed")
        place = place + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(kept.to(tl.int32), 1) - 1
        kept = kept & (place < CAPACITY)
        tl.store(kept_orders + row * CAPACITY + place, order, mask=kept)
        tl.store(kept_entries + row * CAPACITY + place, entry, mask=kept)


@triton.jit
def finish_kernel(
    scores,
    stride,
    visible,
    kept_counts,
    kept_orders,
    kept_entries,
    out,
    COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    total = tl.load(kept_counts + row)
    target = out + row.to(tl.int64) * COUNT
    if total <= CAPACITY:
        slot = tl.arange(0, CAPACITY)
        there = slot < total
        order = tl.load(kept_orders + row * CAPACITY + slot, mask=there, other=NOTHING)
        entry = tl.load(kept_entries + row * CAPACITY + slot, mask=there, other=BEHIND)
        chosen = there
        if total > COUNT:
            last = _best(order, total * 0 + COUNT, 32)
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


def top_entries(
    scores: Tensor, visible: Tensor, *, count: int, capacity: int | None = None, chunk: int = 2048, num_warps: int = 8
) -> Tensor:
    """As `whalepod.kernels.top_entries`, on a GPU, or in Triton's interpreter; `count` a power of two."""
    rows, entries = scores.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    capacity = capacity or 4 * max(count, 512)
    group = group_entries(entries, count=count)
    groups = triton.cdiv(entries, group)
    lanes, chunk = chunk, max(1, chunk // group)
    # Each begins at a whole vector, whatever the rows: for other pointers kernels would be compiled again.
    sizes = [-(-size // 4) * 4 for size in (rows, rows, rows * groups, rows * groups)]
    words = torch.empty(sum(sizes), dtype=torch.int32, device=scores.device)
    bounds, kept_counts, maxima, good_groups = words.split(sizes)
    kept = torch.empty(2, rows, capacity, dtype=torch.int32, device=scores.device)
    stride = scores.stride(0)
    maxima_kernel[(rows, triton.cdiv(groups, chunk))](
        scores, stride, visible, maxima, groups, GROUP=group, CHUNK=chunk, num_warps=4
    )
    # As many lanes for short rows, which have fewer groups: or each length up to here would compile its own.
    wide = max(triton.next_power_of_2(groups), GROUPS_EACH * count)
    bound_kernel[(rows,)](maxima, groups, bounds, kept_counts, COUNT=count, GROUPS=wide, num_warps=num_warps)
    collect_kernel[(rows, triton.cdiv(groups, lanes // 2))](
        scores,
        stride,
        visible,
        maxima,
        groups,
        bounds,
        kept_counts,
        kept[0],
        kept[1],
        good_groups,
        CAPACITY=capacity,
        GROUP=group,
        CHUNK=lanes // 2,
        TILE=max(1, min(lanes // 2, 2048 // group)),
        num_warps=4,
    )
    finish_kernel[(rows,)](
        scores,
        stride,
        visible,
        kept_counts,
        kept[0],
        kept[1],
        out,
        COUNT=count,
        CAPACITY=capacity,
        CHUNK=lanes,
        num_warps=num_warps,
    )
    return out


def group_entries(entries: int, *, count: int) -> int:
    """Entries whose best stands for them: a power of two that leaves up to GROUPS_EACH groups for each wanted entry."""
    group = 1
    while group < 64 and entries > GROUPS_EACH * count * group:
        group *= 2
    return group
