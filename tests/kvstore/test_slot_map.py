from __future__ import annotations

import pytest

from whalepod.kvstore.faults import ErrorReply
from whalepod.kvstore.settings import StoreAddress
from whalepod.kvstore.slot_map import Redirection, SlotMap, slot_of

ASKED = StoreAddress(host="10.0.0.1", port=6379, username="engine", password="secret")


@pytest.mark.parametrize(("key", "slot"), [(b"123456789", 12739), (b"b:{foo}:x", 12182), (b"foo", 12182)])
def test_slots_are_those_of_the_server(key: bytes, slot: int) -> None:
    assert slot_of(key) == slot


def test_redirections_are_read() -> None:
    assert Redirection.parse(ErrorReply("MOVED", "3999 10.0.0.7:6380")) == Redirection(3999, "10.0.0.7", 6380, False)
    assert Redirection.parse(ErrorReply("ASK", "1 :6380")) == Redirection(1, "", 6380, True)
    assert Redirection.parse(ErrorReply("MOVED", "5 fe80::1:6380")) == Redirection(5, "fe80::1", 6380, False)


@pytest.mark.parametrize("message", ["", "1", "x 10.0.0.7:1", "99999 h:1", "1 h:0", "1 h:70000", "1 h:x", "-1 h:1"])
def test_what_is_no_redirection_is_none(message: str) -> None:
    assert Redirection.parse(ErrorReply("MOVED", message)) is None
    assert Redirection.parse(ErrorReply("ERR", "1 h:1")) is None


def test_a_map_keeps_credentials_and_fills_in_the_host() -> None:
    slots = SlotMap()
    rows = [[0, 8191, [b"", 7000, b"id"], [b"10.0.0.9", 7001, b"id"]], [8192, 16383, [b"10.0.0.2", 7002, b"id"]]]
    assert slots.replace(rows, asked=ASKED)  # type: ignore[arg-type]
    low, high = slots.owner_of(b"{bar}"), slots.owner_of(b"{foo}")
    assert (low, high) == (
        StoreAddress(host="10.0.0.1", port=7000, username="engine", password="secret"),
        StoreAddress(host="10.0.0.2", port=7002, username="engine", password="secret"),
    )
    assert len(slots.addresses()) == 2


@pytest.mark.parametrize(
    "reply", [None, b"", [], [1], [[0, 1]], [[0, 16384, [b"h", 1]]], [[5, 1, [b"h", 1]]], [[0, 1, [1]]]]
)
def test_a_strange_reply_changes_nothing(reply: object) -> None:
    slots = SlotMap()
    slots.note(12182, ASKED)
    assert not slots.replace(reply, asked=ASKED)  # type: ignore[arg-type]
    assert slots.owner_of(b"foo") == ASKED
