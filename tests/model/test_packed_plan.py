"""Groups of a forward, as `PackedPlan` lists them: what is pooled, and what the ring of raw rows holds afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from whalepod.model.packed_plan import PackedEntries, PlanShape
from whalepod.model.rows import Rows

Position = tuple[int, int]
"""Segment, and position in it."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Some rows of each of several segments, whose slots are in another order."""

    ratio: int
    ring: int
    starts: list[int]
    ends: list[int]
    slots: list[int]
    padded: bool

    @classmethod
    def drawn(cls, ratio: int, seed: int) -> Forward:
        rng = random.Random(seed)
        starts = [rng.randint(0, 40) for _ in range(rng.randint(1, 5))]
        ends = [start + rng.randint(1, rng.choice([3, 8, 40])) for start in starts]
        slots = rng.sample(range(len(starts)), len(starts))
        return cls(ratio, ratio + rng.choice([2, 4, 12]), starts, ends, slots, padded=rng.random() < 0.5)

    @property
    def rows(self) -> list[Position]:
        return [
            (n, position)
            for n, (start, end) in enumerate(zip(self.starts, self.ends, strict=True))
            for position in range(start, end)
        ]

    def ring_of(self, rows: list[Position]) -> dict[int, Position]:
        return {self.slots[n] * self.ring + position % self.ring: (n, position) for n, position in rows}

    def plan(self) -> PackedEntries:
        count = len(self.rows) + (3 if self.padded else 0)
        segments = len(self.starts) + (1 if self.padded else 0)
        return PackedEntries.build(
            Rows.between(np.array(self.starts), np.array(self.ends), padded=count),
            np.arange(len(self.starts) * 64).reshape(-1, 64),
            np.zeros(len(self.starts), dtype=np.int64),
            np.array(self.slots),
            ratio=self.ratio,
            block_tokens=4 * self.ratio,
            ring_rows=self.ring,
            shape=PlanShape(rows=count, segments=segments, tokens=256, group_rows=8) if self.padded else None,
        )


@pytest.mark.parametrize("ratio", [2, 3, 4])
def test_groups_are_complete_and_what_is_read_in_the_ring_is_overwritten_by_its_reader(ratio: int) -> None:
    for seed in range(300):
        forward = Forward.drawn(ratio, seed)
        plan, rows = forward.plan(), forward.rows
        assert plan.members is not None and plan.keeps is not None
        members, keeps = plan.members.tolist(), plan.keeps.tolist()
        before = forward.ring_of([(n, p) for n, start in enumerate(forward.starts) for p in range(start)])
        readers: dict[int, int] = {}
        after, written, pooled = dict(before), list[int](), set[Position]()
        for group, destination in enumerate(plan.destinations.tolist()):
            found = [rows[member] if member >= 0 else before.get(-1 - member) for member in members[group]]
            readers |= {-1 - member: group for member in members[group] if member < 0}
            if destination >= 0:
                segment, last = found[-1] or (-1, -1)
                assert found == [(segment, last - ratio + 1 + number) for number in range(ratio)], seed
                pooled.add((segment, last))
        for group, kept in enumerate(keeps):
            for member, keep in zip(members[group], kept, strict=True):
                if keep >= 0:
                    place, row = (keep, member) if member >= 0 else (-1 - member, keep)
                    assert readers.get(place, group) == group, f"{seed}: place {place} is read by another program"
                    written.append(place)
                    after[place] = rows[row]
        assert len(set(written)) == len(written), seed
        assert after == before | forward.ring_of(rows), seed
        assert pooled == {(n, position) for n, position in rows if (position + 1) % ratio == 0}, seed
