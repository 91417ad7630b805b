"""A registration is believed only with the cluster's signature, and fits only what stores the same state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whalepod.cluster.registration import AGE_MS_MAX, RankInfo, RankRole, open_registration, sign_registration
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError
from whalepod.core.ids import Incarnation, RankId
from whalepod.engine.interface import Fidelity, RankLoad
from whalepod.rpc.common.v1 import common_pb2

SECRET = ClusterSecret(b"s" * 16)
NOW = 1_800_000_000_000
RANK = RankInfo(
    rank_id=RankId("decode-0"),
    role=RankRole.DECODE,
    pool="decode",
    address="[::1]:8200",
    incarnation=Incarnation(2**62 + 7),
    model="whale",
    namespace=b"n" * 16,
    layout="B=64",
    context_tokens_max=4096,
    fidelities=(Fidelity.FAST,),
    version="1",
    time_unix_ms=NOW,
    load=RankLoad(running=1, waiting=2, blocks_free=3, blocks_total=4, prefill_tokens_queued=5, slots_total=6),
    draining=True,
)


@pytest.mark.parametrize("role", list(RankRole))
def test_a_registration_comes_back_as_it_was_signed(role: RankRole) -> None:
    rank = replace(RANK, role=role)
    assert open_registration(sign_registration(rank, SECRET), SECRET, now_unix_ms=NOW) == rank


def test_another_secret_is_a_forgery() -> None:
    forged = sign_registration(RANK, ClusterSecret(b"t" * 16))
    with pytest.raises(AuthenticationError, match="not signed"):
        open_registration(forged, SECRET, now_unix_ms=NOW)


def test_one_changed_byte_is_a_forgery() -> None:
    signed = common_pb2.SignedRegistration.FromString(sign_registration(RANK, SECRET))
    signed.registration = signed.registration.replace(b"8200", b"8666")
    with pytest.raises(AuthenticationError, match="not signed"):
        open_registration(signed.SerializeToString(), SECRET, now_unix_ms=NOW)


def test_a_ticket_cannot_pass_for_a_registration() -> None:
    signed = common_pb2.SignedRegistration.FromString(sign_registration(RANK, SECRET))
    signed.mac = SECRET.mac(Purpose.TICKET, signed.registration)
    with pytest.raises(AuthenticationError, match="not signed"):
        open_registration(signed.SerializeToString(), SECRET, now_unix_ms=NOW)


@pytest.mark.parametrize("shift", [AGE_MS_MAX + 1, -AGE_MS_MAX - 1])
def test_a_registration_of_another_time_is_a_replay(shift: int) -> None:
    with pytest.raises(AuthenticationError, match="too old"):
        open_registration(sign_registration(RANK, SECRET), SECRET, now_unix_ms=NOW + shift)


@pytest.mark.parametrize("data", [b"", b"garbage", b"\xff" * 40])
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(AuthenticationError):
        open_registration(data, SECRET, now_unix_ms=NOW)


def test_f26_an_incompatible_rank_is_refused_with_both_layouts_named() -> None:
    reason = RANK.incompatibility(model="whale", namespace=b"m" * 16, layout="B=256")
    assert reason is not None
    assert "B=64" in reason
    assert "B=256" in reason
    assert RANK.incompatibility(model="whale", namespace=b"n" * 16, layout="B=64") is None


def test_a_rank_that_speaks_tls_is_refused_by_who_does_not_and_the_other_way_round() -> None:
    for rank, speaks_tls in ((RANK, True), (replace(RANK, speaks_tls=True), False)):
        reason = rank.unreachable_for(speaks_tls=speaks_tls)
        assert reason is not None
        assert "tls.peer_cert_file" in reason
        assert rank.unreachable_for(speaks_tls=not speaks_tls) is None


def test_another_model_is_refused_by_name() -> None:
    reason = RANK.incompatibility(model="orca", namespace=b"n" * 16, layout="B=64")
    assert reason is not None
    assert "whale" in reason
    assert "orca" in reason
