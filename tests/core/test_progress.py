"""Long work is shown to a person as a bar, and to a log as lines with a rate."""

from __future__ import annotations

import os
import pty
import re
from pathlib import Path

import pytest
from rich.console import Console

from whalepod.core.progress import MIB, SAY_EVERY_S, ProgressReport


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def test_where_nobody_looks_a_line_now_and_then_tells_rate_and_time_left(tmp_path: Path) -> None:
    clock, said = HandClock(), list[str]()
    with (tmp_path / "log").open("w") as file:
        report = ProgressReport(
            "weights", unit="MiB", unit_size=MIB, say=said.append, console=Console(file=file), clock=clock
        )
        for read in range(1, 31):
            clock.now_s += SAY_EVERY_S / 5
            report.note(read * MIB, 30 * MIB)
        report.finish()
    assert said[0] == "weights: 5/30 MiB, 0.5 MiB/s, 50 s left"
    assert said[5:] == ["weights: 30/30 MiB, 0.5 MiB/s, 0 s left", "weights: 30 MiB in 60.0 s, 0.5 MiB/s"]
    assert (tmp_path / "log").read_text() == "", "no bar"


def test_what_was_done_before_counts_for_no_rate(tmp_path: Path) -> None:
    clock, said = HandClock(), list[str]()
    with (tmp_path / "log").open("w") as file:
        report = ProgressReport(
            "batch", unit="requests", total=100, say=said.append, console=Console(file=file), clock=clock
        )
        report.begin_at(80)
        clock.now_s += SAY_EVERY_S
        report.note(90, detail="2 failed")
    assert said == ["batch: 90/100 requests, 1 requests/s, 2 failed, 10 s left"]


@pytest.mark.parametrize("seconds", [0.1, 5.0])
def test_a_person_sees_a_bar_of_work_that_lasts_and_no_lines(seconds: float) -> None:
    clock, said = HandClock(), list[str]()
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        console = Console(file=terminal, width=100)
        report = ProgressReport("[batch]", unit="requests", total=4, say=said.append, console=console, clock=clock)
        with report:
            for _ in range(3):
                clock.now_s += seconds / 3
                report.advance()
            assert said == []
            report.finish()
    shown = read_all(ours)
    assert ("[batch]" in shown) == (seconds > 1)
    assert ("3/4 requests, 0.6 requests/s" in shown) == (seconds > 1)
    assert len(said) == 1


def read_all(descriptor: int) -> str:
    """What a terminal was sent, without colours."""
    sent = b""
    try:
        while chunk := os.read(descriptor, 65536):
            sent += chunk
    except OSError:  # its other end is closed
        pass
    os.close(descriptor)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", sent.decode())
