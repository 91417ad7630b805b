"""`whalepod top` shows what a router's dashboard tells."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from whalepod.cli.top import screen

SNAPSHOT: dict[str, Any] = {
    "time_unix_ms": 1000,
    "version": "0.1.0",
    "process": [1, 1],
    "model": "whale",
    "readiness": {"status": "ready", "reasons": [], "store": "ok", "registry": "ok"},
    "running": 3,
    "waiting": 1,
    "ranks": [
        {
            "rank": "decode-0", "role": "decode", "address": "10.0.0.1:8200", "draining": False, "running": 8,
            "slots": 16, "waiting": 2, "blocks_used": 5, "blocks": 10, "prompt_rows": 64,
            "numbers": {"drafts_verified": 10.0, "drafts_accepted": 7.0},
        }
    ],
    "counters": {
        "requests": {"ok": 4.0}, "completion_tokens": {"": 100.0}, "shed": {}, "prompt_tokens": {"": 200.0},
        "cached_tokens": {"": 50.0}, "failovers": {"": 1.0}, "streams_broken": {"": 0.0},
    },
}  # fmt: skip


def shown(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(screen(now, before))
    return capture.get()


def test_ranks_and_rates_are_shown() -> None:
    before = {**SNAPSHOT, "time_unix_ms": 0, "counters": {**SNAPSHOT["counters"], "completion_tokens": {"": 40.0}}}
    text = shown(SNAPSHOT, before)
    assert "60.0 tokens/s" in text
    assert "25% of prompt tokens restored" in text
    for part in ("decode-0", "8/16", "5/10", "70%", "serving", "ready"):
        assert part in text
    assert "process" not in text
    assert "process 2 of 3" in shown({**SNAPSHOT, "process": [2, 3]}, None)
    lost = {
        **SNAPSHOT,
        "ranks": [],
        "readiness": {**SNAPSHOT["readiness"], "status": "unavailable", "reasons": ["no decode rank is usable"]},
    }
    assert "no decode rank is usable" in shown(lost, None)
