"""The small parts of a snapshot: what was packed comes back, and any other bytes are none."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from whalepod.engine.interface import SampledToken, SnapshotKind
from whalepod.engine.snapshot_format import SequenceState, kind_of, mode_of

TOKEN = SampledToken(7, logprob=-1.5, top_ids=(7, 9), top_logprobs=(-1.5, -2.25))


def _as_float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_f27_stamps_tell_the_kinds_apart_and_from_strangers() -> None:
    assert {kind_of(mode_of(kind)) for kind in SnapshotKind} == set(SnapshotKind)
    assert kind_of(0) is None
    assert kind_of(mode_of(SnapshotKind.FULL) ^ 0x0100) is None


@given(
    tokens=st.integers(0, 2**32 - 1),
    token_id=st.integers(0, 2**32 - 1),
    logprob=st.none() | st.floats(-100, 0, width=32),
    top=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-100, 0, width=32)), max_size=20),
)
def test_state_comes_back(tokens: int, token_id: int, logprob: float | None, top: list[tuple[int, float]]) -> None:
    token = SampledToken(
        token_id,
        logprob=logprob,
        top_ids=tuple(pair[0] for pair in top),
        top_logprobs=tuple(_as_float32(pair[1]) for pair in top),
    )
    state = SequenceState(tokens, token)
    assert SequenceState.parse(state.encode()) == state


def test_state_without_a_token_comes_back() -> None:
    assert SequenceState.parse(SequenceState(100).encode()) == SequenceState(100)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_state_or_none(data: bytes) -> None:
    state = SequenceState.parse(data)
    assert state is None or len(state.encode()) == len(data)


def test_a_state_of_another_length_version_or_flag_is_none() -> None:
    good = SequenceState(100, TOKEN).encode()
    assert SequenceState.parse(good) is not None
    for bad in (good[:-1], good + b"\0", b"\2" + good[1:], good[:1] + b"\x83" + good[2:], b""):
        assert SequenceState.parse(bad) is None
