"""A signature holds for its bytes, its purpose and its secret, and for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.core.credentials import SECRET_BYTES_MIN, ClusterSecret, Purpose

SECRET = ClusterSecret(b"0123456789abcdef")


@pytest.mark.parametrize("purpose", Purpose)
def test_what_was_signed_verifies(purpose: Purpose) -> None:
    assert SECRET.verifies(purpose, b"payload", SECRET.mac(purpose, b"payload"))


def test_a_registration_never_passes_for_a_ticket() -> None:
    mac = SECRET.mac(Purpose.REGISTRATION, b"payload")
    assert not SECRET.verifies(Purpose.TICKET, b"payload", mac)


def test_purposes_cannot_be_mistaken_by_moving_bytes_into_the_payload() -> None:
    macs = {
        SECRET.mac(purpose, payload) for purpose in Purpose for payload in (b"", purpose.value, b"x" + purpose.value)
    }
    assert len(macs) == 3 * len(Purpose)


def test_another_secret_does_not_verify() -> None:
    mac = ClusterSecret(b"fedcba9876543210").mac(Purpose.TICKET, b"payload")
    assert not SECRET.verifies(Purpose.TICKET, b"payload", mac)


@given(payload=st.binary(min_size=1, max_size=64), bit=st.integers(min_value=0))
def test_one_flipped_bit_of_payload_or_mac_does_not_verify(payload: bytes, bit: int) -> None:
    mac = SECRET.mac(Purpose.TICKET, payload)
    assert not SECRET.verifies(Purpose.TICKET, _flipped(payload, bit), mac)
    assert not SECRET.verifies(Purpose.TICKET, payload, _flipped(mac, bit))


@pytest.mark.parametrize("mac", [b"", b"short", bytes(31), bytes(33)])
def test_a_mac_of_another_length_does_not_verify(mac: bytes) -> None:
    assert not SECRET.verifies(Purpose.TICKET, b"payload", mac)


def test_a_short_secret_is_refused_and_says_how_long_it_must_be() -> None:
    with pytest.raises(ValueError, match=str(SECRET_BYTES_MIN)):
        ClusterSecret(b"x" * (SECRET_BYTES_MIN - 1))


def test_the_secret_does_not_show_when_it_is_printed() -> None:
    assert "0123456789abcdef" not in repr(SECRET)


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


STAGES = (
    b"the old secret..",
    b"the old secret..\nthe new secret..\n",
    b"the new secret..\nthe old secret..",
    b"the new secret..",
)
"""Of replacing a secret, process by process."""


@pytest.mark.parametrize("stage", range(len(STAGES) - 1))
def test_processes_at_neighbouring_stages_of_a_new_secret_believe_each_other(stage: int) -> None:
    before, after = (ClusterSecret.parse(text) for text in STAGES[stage : stage + 2])
    for signer, reader in (before, after), (after, before):
        assert reader.verifies(Purpose.TICKET, b"x", signer.mac(Purpose.TICKET, b"x"))
        assert not reader.verifies(Purpose.SALT, b"x", signer.mac(Purpose.TICKET, b"x"))


def test_a_secret_that_was_taken_away_is_believed_no_more() -> None:
    first, *_, last = (ClusterSecret.parse(text) for text in STAGES)
    assert not last.verifies(Purpose.TICKET, b"x", first.mac(Purpose.TICKET, b"x"))


@pytest.mark.parametrize("text", [b"", b"\n \n", b"short", b"the old secret..\nshort"])
def test_no_short_secret_is_taken_on_any_line(text: bytes) -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        ClusterSecret.parse(text)


def test_secrets_are_passed_on_whole_and_never_shown() -> None:
    secret = ClusterSecret.parse(STAGES[1])
    assert ClusterSecret.parse(secret.text) == secret
    assert "secret.." not in repr(secret)
