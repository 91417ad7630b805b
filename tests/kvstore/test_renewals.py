from __future__ import annotations

import pytest

from tests.kvstore.test_breaker import HandClock
from tests.kvstore.values import chain
from whalepod.kvstore import renewals
from whalepod.kvstore.renewals import Renewals


def test_a_block_is_due_until_it_is_renewed_and_again_after_the_interval() -> None:
    clock = HandClock()
    subject = Renewals(interval_s=600, clock=clock)
    keys = chain(3)
    assert subject.due(keys) == keys
    subject.note(keys[:2])
    assert subject.due(keys) == keys[2:]
    clock.now_s += 600
    assert subject.due(keys) == keys


def test_memory_is_bounded_and_forgets_the_longest_unrenewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewals, "REMEMBERED_MAX", 3)
    subject = Renewals(interval_s=600, clock=HandClock())
    keys = chain(4)
    subject.note(keys[:3])
    subject.note(keys[:1])
    subject.note(keys[3:])
    assert subject.due(keys) == [keys[1]]
