"""Leaves first, the longest unused before others, and only those of whoever has too much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from whalepod.kvstore.eviction import bytes_by_owner, plan_eviction, plan_quotas
from whalepod.kvstore.survey import StoredBlock


def block(name: int, parent: int, *, left_ms: int, owner: int = 1, size: int = 10) -> StoredBlock:
    return StoredBlock(b"k%d" % name, _hash(name), _hash(parent), bytes(16), owner, 0, size, left_ms)


def _hash(name: int) -> bytes:
    return name.to_bytes(32, "little")


def chain(start: int, length: int, *, left_ms: int, owner: int = 1) -> list[StoredBlock]:
    """Blocks `start` …; each expires a little before its parent."""
    first = [block(start, 1000 + start, left_ms=left_ms, owner=owner)]
    rest = [block(start + i, start + i - 1, left_ms=left_ms - i, owner=owner) for i in range(1, length)]
    return first + rest


def test_a_prefix_goes_from_its_end_and_the_older_one_first() -> None:
    old, new = chain(0, 3, left_ms=100), chain(10, 3, left_ms=900)
    chosen = plan_eviction([*new, *old], bytes_to_free=40, keys_max=100)
    assert [item.key for item in chosen] == [b"k2", b"k1", b"k0", b"k12"]


def test_a_shared_beginning_stays_while_anything_needs_it() -> None:
    trunk = block(0, 99, left_ms=1)
    leaves = [block(1, 0, left_ms=500), block(2, 0, left_ms=600)]
    chosen = plan_eviction([trunk, *leaves], bytes_to_free=20, keys_max=100)
    assert [item.key for item in chosen] == [b"k1", b"k2"]


def test_no_more_is_removed_than_asked_for_or_allowed() -> None:
    blocks = chain(0, 10, left_ms=100)
    assert len(plan_eviction(blocks, bytes_to_free=25, keys_max=100)) == 3
    assert len(plan_eviction(blocks, bytes_to_free=10_000, keys_max=4)) == 4
    assert plan_eviction(blocks, bytes_to_free=0, keys_max=4) == []


def test_only_who_has_too_much_gives_something_back() -> None:
    greedy, modest = chain(0, 5, left_ms=900, owner=7), chain(10, 2, left_ms=1, owner=8)
    chosen = plan_quotas([*greedy, *modest], quota_bytes=30, keys_max=100)
    assert [item.key for item in chosen] == [b"k4", b"k3"]
    assert plan_quotas([*greedy, *modest], quota_bytes=None, keys_max=100) == []
    assert bytes_by_owner([*greedy, *modest]) == {7: 50, 8: 20}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40), st.integers(0, 400), st.integers(0, 50))
def test_what_is_left_never_has_a_hole(parents: list[int], bytes_to_free: int, keys_max: int) -> None:
    blocks = [block(number, min(parent, number - 1) if number else 999, left_ms=(number * 7) % 11)
              for number, parent in enumerate(parents)]  # fmt: skip
    gone = {item.hash for item in plan_eviction(blocks, bytes_to_free=bytes_to_free, keys_max=keys_max)}
    assert len(gone) <= keys_max
    for item in blocks:
        assert item.hash in gone or item.parent not in gone
