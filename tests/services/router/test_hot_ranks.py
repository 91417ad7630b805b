"""Where the state of a conversation is."""

from __future__ import annotations

from whalepod.core.block_keys import BlockHash
from whalepod.core.ids import RankId
from whalepod.services.router.hot_ranks import HotRanks, OwnPlaces

ONE, TWO = RankId("decode-1"), RankId("decode-2")


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(text[: index + 1].encode()) for index in range(len(text))]


def test_a_next_turn_is_known_by_the_blocks_it_repeats() -> None:
    hot = HotRanks()
    hot.note(ONE, session=None, hashes=hashes("system one"))
    hot.note(TWO, session=None, hashes=hashes("system two"))
    assert hot.find(session=None, hashes=hashes("system one and more")) == ONE
    assert hot.find(session=None, hashes=hashes("system two and more")) == TWO
    assert hot.find(session=None, hashes=hashes("something else")) is None
    assert hot.find(session=None, hashes=[]) is None


def test_a_session_is_known_by_its_name_within_its_tenant() -> None:
    hot = HotRanks()
    hot.note(ONE, session=("a", "chat"), hashes=hashes("x"))
    assert hot.find(session=("a", "chat"), hashes=hashes("y")) == ONE
    assert hot.find(session=("b", "chat"), hashes=hashes("y")) is None
    hot.note(TWO, session=("a", "chat"), hashes=hashes("xy"))
    assert hot.find(session=("a", "chat"), hashes=hashes("y")) == TWO


def test_the_oldest_is_forgotten_first() -> None:
    hot = HotRanks(OwnPlaces(remembered_max=2))
    for name in "abc":
        hot.note(ONE, session=("t", name), hashes=[])
    assert [hot.find(session=("t", name), hashes=[]) for name in "abc"] == [None, ONE, ONE]
