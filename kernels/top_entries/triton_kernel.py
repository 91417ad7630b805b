"""The best entries of each row in Triton, exactly, in two launches.

    maxima      the best score of every few consecutive entries
    choose      one program a row. Finds a bound that enough groups reach, and not many more; keeps the scores that are
                not below it, out of those groups; finds the exact score among what was kept. All in order of entries,
                so the first of equal scores are the lower entries, and the result is sorted.

Rows that see few entries have smaller groups than the others: so many groups are left that a bound is useful. If more
is kept than its buffer holds (scores that are nearly all equal), the row itself is searched: slow, and as exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from whalepod.kernels.launch_sizes import launch_sizes

NOTHING = tl.constexpr(-2147483648)
BEHIND = tl.constexpr(2147483647)
GROUPS_EACH = tl.constexpr(8)
"""For each wanted entry, at most, but in rows so long that groups are as large as they get."""
GROUP_MAX = 64


@triton.jit
def _ordered(scores):
    """float32 -> int32 of the same order; both zeros are one."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _middle(low, high):
    """Halfway from low to high, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _bound(orders, low, there, count, most):
    """The highest order that at least `count` of `orders` reach, or a lower one that at most `most` reach; and how many
    do. `there` of them reach `low`, at least `count`."""
    high = tl.max(orders, 0)
    while (low < high) & (there > most):
        trial = _middle(low, high)
        number = tl.sum((orders >= trial).to(tl.int32), 0)
        enough = number >= count
        low = tl.where(enough, trial, low)
        there = tl.where(enough, number, there)
        high = tl.where(enough, high, trial - 1)
    return low, there


@triton.jit
def _store_maxima(scores, seen, start, maxima, EACH: tl.constexpr, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """The best of every EACH of CHUNK scores; of every eighth of EACH if the row has few."""
    SMALLER: tl.constexpr = (EACH + 7) // 8
    if EACH > SMALLER and seen <= GROUPS_EACH * COUNT * SMALLER:
        _store_maxima(scores, seen, start, maxima, SMALLER, COUNT, CHUNK)
    else:
        entry = start + tl.arange(0, CHUNK // EACH)[:, None] * EACH + tl.arange(0, EACH)[None, :]
        order = _ordered(tl.load(scores + entry, mask=entry < seen, other=0.0))
        order = tl.max(tl.where(entry < seen, order, NOTHING), 1)
        group = start // EACH + tl.arange(0, CHUNK // EACH)
        tl.store(maxima + group, order, mask=group * EACH < seen)


@triton.jit
def maxima_kernel(
    scores, stride, visible, maxima, slots, COUNT: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr
):
    """Program (row, part): the maxima of CHUNK entries."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    seen = tl.load(visible + row)
    if start < seen:
        _store_maxima(scores + row * stride, seen, start, maxima + row * slots, GROUP, COUNT, CHUNK)


@triton.jit
def _bits(words):
    """How many bits of a word are set; its sign bit counts."""
    pairs = words - ((words >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return ((((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24) & 0xFF


@triton.jit
def _keep(
    scores, seen, maxima, listed, kept_entries,
    EACH: tl.constexpr, COUNT: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """Keep entries in order -> a bound that the scores of at least COUNT reach, and how many do; kept are the first.

    Few of the scores that are read are kept. So each group, or half of one, becomes a word of bits first.
    """
    WORD: tl.constexpr = min(EACH, 32)
    TILE: tl.constexpr = min(GATHERED // WORD, max(COUNT, 128))
    group = tl.arange(0, SLOTS)
    groups = (seen + (EACH - 1)) // EACH
    best = tl.load(maxima + group, mask=group < groups, other=NOTHING)
    bound = seen * 0 + NOTHING
    number = groups
    if groups > COUNT:
        lowest = tl.min(tl.where(group < groups, best, BEHIND), 0)
        bound, number = _bound(best, lowest, groups, COUNT, COUNT + COUNT // 8)
    good = (best >= bound) & (group < groups)
    tl.store(listed + tl.cumsum(good.to(tl.int32), 0) - 1, group, mask=good)
    tl.debug_barrier()
    total = seen * 0
    words = number * (EACH // WORD)
    for start in range(0, words, TILE):
        slot = start + tl.arange(0, TILE)
        first = tl.load(listed + slot // (EACH // WORD), mask=slot < words, other=0) * EACH
        first += slot % (EACH // WORD) * WORD
        place = tl.arange(0, WORD)[None, :]
        there = (slot < words)[:, None] & (first[:, None] + place < seen)
        order = _ordered(tl.load(scores + first[:, None] + place, mask=there, other=0.0))
        word = tl.sum(tl.where(there & (order >= bound), tl.full((1, WORD), 1, tl.int32) << place, 0), 1)
        each = _bits(word)
        target = total + tl.cumsum(each, 0) - each
        for _ in range(tl.max(each, 0)):
            lowest_bit = word & -word
            entry = first + _bits(lowest_bit - 1)
            tl.store(kept_entries + target, entry, mask=(word != 0) & (target < CAPACITY))
            word ^= lowest_bit
            target += 1
        total += tl.sum(each, 0)
    tl.debug_barrier()
    return bound, total


@triton.jit
def _keep_of_row(
    scores, seen, maxima, listed, kept_entries,
    EACH: tl.constexpr, COUNT: tl.constexpr, CAPACITY: tl.constexpr, SLOTS: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    """`_keep` with groups as `_store_maxima` has them."""
    SMALLER: tl.constexpr = (EACH + 7) // 8
    if EACH > SMALLER and seen <= GROUPS_EACH * COUNT * SMALLER:
        bound, total = _keep_of_row(
            scores, seen, maxima, listed, kept_entries, SMALLER, COUNT, CAPACITY, SLOTS, GATHERED
        )
    else:
        bound, total = _keep(scores, seen, maxima, listed, kept_entries, EACH, COUNT, CAPACITY, SLOTS, GATHERED)
    return bound, total


@triton.jit
def choose_kernel(
    scores,
    stride,
    visible,
    maxima,
    slots,
    listed,
    kept_entries,
    out,
    COUNT: tl.constexpr,
    CAPACITY: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    GATHERED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seen = tl.load(visible + row)
    scores += row * stride
    maxima += row * slots
    listed += row * slots
    kept_entries += row * CAPACITY
    target = out + row * COUNT
    bound, total = _keep_of_row(scores, seen, maxima, listed, kept_entries, GROUP, COUNT, CAPACITY, SLOTS, GATHERED)
    if total > CAPACITY:
        _search_row(scores, seen, bound, total, target, COUNT, CAPACITY)
    else:
        slot = tl.arange(0, CAPACITY)
        there = slot < total
        entry = tl.load(kept_entries + slot, mask=there, other=0)
        order = tl.where(there, _ordered(tl.load(scores + entry, mask=there, other=0.0)), NOTHING)
        chosen = there
        if total > COUNT:
            last, reached = _bound(order, bound, total, COUNT, COUNT)
            chosen = there & (order >= last)
            if reached > COUNT:
                # Of those that equal the last score, the first.
                above = order > last
                equal = there & (order == last)
                room = COUNT - tl.sum(above.to(tl.int32), 0)
                chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        tl.store(target + tl.cumsum(chosen.to(tl.int32), 0) - 1, entry, mask=chosen)
        slot = tl.arange(0, COUNT)
        tl.store(target + slot, slot * 0 - 1, mask=slot >= total)


@triton.jit
def _search_row(scores, seen, low, reached, target, COUNT: tl.constexpr, CHUNK: tl.constexpr):
    """Find the COUNT-th best score of a whole row, from `low` on, which `reached` reach; write in order of entries."""
    lane = tl.arange(0, CHUNK)
    high = low
    for start in range(0, seen, CHUNK):
        there = start + lane < seen
        order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
        high = tl.maximum(high, tl.max(tl.where(there, order, NOTHING), 0))
    while (low < high) & (reached > COUNT):
        trial = _middle(low, high)
        number = seen * 0
        for start in range(0, seen, CHUNK):
            there = start + lane < seen
            order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
            number += tl.sum((there & (order >= trial)).to(tl.int32), 0)
        enough = number >= COUNT
        low = tl.where(enough, trial, low)
        reached = tl.where(enough, number, reached)
        high = tl.where(enough, high, trial - 1)
    above = seen * 0
    for start in range(0, seen, CHUNK):
        there = start + lane < seen
        order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
        above += tl.sum((there & (order > low)).to(tl.int32), 0)
    room = COUNT - above
    written = seen * 0
    for start in range(0, seen, CHUNK):
        there = start + lane < seen
        order = _ordered(tl.load(scores + start + lane, mask=there, other=0.0))
        equal = there & (order == low)
        chosen = (there & (order > low)) | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        tl.store(target + written + tl.cumsum(chosen.to(tl.int32), 0) - 1, start + lane, mask=chosen)
        room -= tl.sum(equal.to(tl.int32), 0)
        written += tl.sum(chosen.to(tl.int32), 0)


def top_entries(scores: Tensor, visible: Tensor, *, count: int, capacity: int | None = None) -> Tensor:
    """As `whalepod.kernels.top_entries`, on a GPU, or in Triton's interpreter; `count` a power of two."""
    rows, entries = scores.shape
    out = torch.empty(rows, count, dtype=torch.int32, device=scores.device)
    if rows == 0:
        return out
    capacity = capacity or 4 * max(count, 512)
    group = group_entries(entries, count=count)
    # As many for short rows, which have fewer groups: or each length up to here would compile its own.
    slots = max(triton.next_power_of_2(triton.cdiv(entries, group)), GROUPS_EACH.value * count)
    maxima, listed = torch.empty(2, rows, slots, dtype=torch.int32, device=scores.device)
    kept_entries = torch.empty(rows, capacity, dtype=torch.int32, device=scores.device)
    stride = scores.stride(0)
    sizes = launch_sizes("group_maxima", scores, rows=rows, shape=count)
    maxima_kernel[(rows, triton.cdiv(entries, sizes["CHUNK"]))](
        scores, stride, visible, maxima, slots, COUNT=count, GROUP=group, **sizes
    )
    sizes = launch_sizes("top_entries", scores, rows=rows, shape=count)
    choose_kernel[(rows,)](
        scores,
        stride,
        visible,
        maxima,
        slots,
        listed,
        kept_entries,
        out,
        COUNT=count,
        CAPACITY=capacity,
        GROUP=group,
        SLOTS=slots,
        GATHERED=sizes["GATHERED"],
        num_warps=sizes["num_warps"],
        maxnreg=sizes["maxnreg"] or None,
    )
    return out


def group_entries(entries: int, *, count: int) -> int:
    """Entries whose best stands for them: a power of two that leaves up to GROUPS_EACH groups for each wanted entry."""
    group = 1
    while group < GROUP_MAX and entries > GROUPS_EACH.value * count * group:
        group *= 2
    return group
