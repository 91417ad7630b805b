"""Who computes which blocks, and what of a prompt is on its way."""

from __future__ import annotations

from whalepod.core.block_keys import BlockHash
from whalepod.services.router.pending_prefixes import REMEMBERED_S, Pending, PendingPrefixes


def hashes(text: str) -> list[BlockHash]:
    """One block a letter, named by all before it."""
    return [BlockHash(text[: index + 1].encode()) for index in range(len(text))]


def depth(table: PendingPrefixes, text: str, *, stored: int = 0, now_s: float = 0.0) -> tuple[int, Pending] | None:
    share = table.longest(hashes(text), stored_blocks=stored, now_s=now_s)
    return None if share is None else (share.depth_blocks, share.pending)


def test_the_longest_common_prefix_is_found_and_nothing_beyond() -> None:
    table = PendingPrefixes()
    first = table.begin(hashes("abcdef"), stored_blocks=0, now_s=0, seconds=6)
    for text, blocks in {"abcdef": 6, "abcxyz": 3, "a": 1, "abcdefgh": 6}.items():
        assert depth(table, text) == (blocks, first)
    assert depth(table, "xbcdef") is None
    assert depth(table, "") is None


def test_what_is_stored_is_nobodys() -> None:
    table = PendingPrefixes()
    first = table.begin(hashes("abcdef"), stored_blocks=2, now_s=0, seconds=6)
    assert depth(table, "abcx", stored=2) == (3, first)
    assert depth(table, "abx", stored=2) is None


def test_a_follower_computes_only_its_own_end() -> None:
    table = PendingPrefixes()
    first = table.begin(hashes("abc"), stored_blocks=0, now_s=0, seconds=3)
    second = table.begin(hashes("abcde"), stored_blocks=0, now_s=0, seconds=5)
    assert depth(table, "abcx") == (3, first)
    assert depth(table, "abcdx") == (4, second)


def test_a_prefix_that_was_just_stored_is_known_for_a_while() -> None:
    table = PendingPrefixes()
    first = table.begin(hashes("abc"), stored_blocks=0, now_s=0, seconds=3)
    table.end(first, stored=True, now_s=2)
    table.end(first, stored=False, now_s=9)  # repeated: of no effect
    assert depth(table, "abcd", now_s=2 + REMEMBERED_S) == (3, first)
    assert first.stored
    assert depth(table, "abcd", now_s=2.1 + REMEMBERED_S) is None


def test_a_computation_that_was_lost_is_nobodys_any_more() -> None:
    table = PendingPrefixes()
    first = table.begin(hashes("abc"), stored_blocks=0, now_s=0, seconds=3)
    table.end(first, stored=False, now_s=1)
    assert depth(table, "abc", now_s=1) is None
    second = table.begin(hashes("abcd"), stored_blocks=0, now_s=1, seconds=3)
    assert depth(table, "abc", now_s=1) == (3, second)


def test_blocks_are_expected_one_after_another() -> None:
    pending = Pending(first_block=2, blocks=6, began_s=10, expected_s=18)
    assert [pending.expected_at_s(blocks) for blocks in (1, 2, 4, 6)] == [10, 10, 14, 18]


def test_the_table_is_bounded() -> None:
    table = PendingPrefixes(blocks_max=4)
    for name in "stuvw":
        table.begin(hashes(name * 2), stored_blocks=0, now_s=0, seconds=1)
    assert len(table) == 4
    assert depth(table, "vv") is not None
    assert depth(table, "ss") is None
