"""Streams of any bytes against both halves of the client (`wire_fuzz.py`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kvstore.wire_fuzz import fuzz
from tests.native_build import ROOT, compiler
from whalepod.kvstore.native_library import NATIVE

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native half was not built here")


def test_both_halves_make_the_same_of_any_stream_and_take_no_wrong_byte() -> None:
    told: list[str] = []
    figures = fuzz(40, seed=1000, tell=told.append)
    assert (figures["rounds"], figures["wrong"], figures["unlike"]) == (120, 0, 0), told


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
def test_the_c_half_touches_no_byte_outside_while_signals_interrupt_it() -> None:
    command = [sys.executable, "-m", "tests.kvstore.wire_fuzz", "--sanitize", "--rounds", "300", "--seed", "5000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
