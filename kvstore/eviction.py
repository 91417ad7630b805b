"""Which blocks to remove first: leaves, the longest unused before others (`kvstore.md` §7.2). Pure.

A block's time to live tells when it was used last: each use sets it to the retention, less a little for its depth.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set

from .survey import StoredBlock

KEYS_SHARE_A_MINUTE = 0.05
"""Of all keys: an evictor that is wrong does no more harm than this."""
KEYS_A_MINUTE_MIN = 200
"""A small store would otherwise be tended one block at a time."""


def plan_eviction(
    blocks: Sequence[StoredBlock], *, bytes_to_free: int, keys_max: int, parents_elsewhere: Set[bytes] = frozenset()
) -> list[StoredBlock]:
    """Blocks to remove, in order: always a leaf of what is left, and of those the one that expires first.

    `parents_elsewhere`: blocks that go on on another server. They come after all that go on nowhere.
    """
    present = {block.hash: block for block in blocks}
    children = Counter(block.parent for block in blocks)
    leaves = [
        (block.hash in parents_elsewhere, block.left_ms, block.hash) for block in blocks if not children[block.hash]
    ]
    heapq.heapify(leaves)
    chosen: list[StoredBlock] = []
    freed = 0
    while leaves and freed < bytes_to_free and len(chosen) < keys_max:
        block = present[heapq.heappop(leaves)[2]]
        chosen.append(block)
        freed += block.value_bytes
        children[block.parent] -= 1
        parent = present.get(block.parent)
        if parent is not None and not children[parent.hash]:
            heapq.heappush(leaves, (parent.hash in parents_elsewhere, parent.left_ms, parent.hash))
    return chosen


def plan_quotas(blocks: Sequence[StoredBlock], *, quota_bytes: int | None, keys_max: int) -> list[StoredBlock]:
    """Blocks of those owners who have more than `quota_bytes` (None: no limit): their own leaves, the oldest first."""
    by_owner: defaultdict[int, list[StoredBlock]] = defaultdict(list)
    for block in blocks:
        by_owner[block.owner].append(block)
    chosen: list[StoredBlock] = []
    for owner, theirs in by_owner.items():
        excess = sum(block.value_bytes for block in theirs) - quota_bytes if quota_bytes is not None and owner else 0
        if excess > 0:
            chosen += plan_eviction(theirs, bytes_to_free=excess, keys_max=keys_max - len(chosen))
    return chosen


def bytes_by_owner(blocks: Iterable[StoredBlock]) -> dict[int, int]:
    """What each owner has stored."""
    total: Counter[int] = Counter()
    for block in blocks:
        total[block.owner] += block.value_bytes
    return dict(total)
