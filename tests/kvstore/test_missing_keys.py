"""What was missing a moment ago is not asked for again; what was stored meanwhile is."""

from __future__ import annotations

from dataclasses import dataclass

from whalepod.kvstore.missing_keys import REMEMBERED_MAX, MissingKeys


@dataclass
class Clock:
    now_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def test_a_missing_key_is_remembered_for_its_life() -> None:
    clock = Clock()
    missing = MissingKeys(life_s=1.0, clock=clock)
    missing.note(b"a", asked_at_s=0.0)
    assert b"a" in missing
    assert b"b" not in missing
    clock.now_s = 1.0
    assert b"a" not in missing


def test_a_key_stored_after_it_was_asked_for_is_not_missing() -> None:
    clock = Clock()
    missing = MissingKeys(life_s=10.0, clock=clock)
    missing.note(b"a", asked_at_s=0.0)
    clock.now_s = 1.0
    missing.forget([b"a"])
    assert b"a" not in missing
    missing.note(b"a", asked_at_s=0.5)
    assert b"a" not in missing, "the answer is older than the write"
    missing.note(b"a", asked_at_s=2.0)
    assert b"a" in missing


def test_only_so_many_are_remembered() -> None:
    missing = MissingKeys(life_s=10.0, clock=Clock())
    for number in range(REMEMBERED_MAX + 1):
        missing.note(b"%d" % number, asked_at_s=0.0)
    assert b"0" not in missing
    assert b"%d" % REMEMBERED_MAX in missing
