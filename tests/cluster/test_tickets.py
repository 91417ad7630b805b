"""Ranks believe signed, fresh tickets that name them, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest

from whalepod.cluster.tickets import (
    CLOCK_SKEW_MS,
    engine_request_from_ticket,
    noise_key_of_request,
    pack_ids,
    sign_ticket,
    unpack_hashes,
    unpack_ids,
    verify_ticket_or_raise,
)
from whalepod.core.block_keys import chain_root
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError, InvalidFieldError
from whalepod.core.ids import RequestId
from whalepod.engine.interface import Fidelity, Work
from whalepod.rpc.common.v1 import common_pb2

SECRET = ClusterSecret(b"0123456789abcdef")
NAMESPACE = b"n" * 16


@dataclass
class StoppedClock:
    now_ms: int = 1_000_000

    def monotonic_s(self) -> float:
        return self.now_ms / 1000

    def unix_ms(self) -> int:
        return self.now_ms


def make_ticket(**changes: object) -> common_pb2.Ticket:
    fields: dict[str, object] = {
        "request_id": b"r" * 16,
        "attempt": 1,
        "decode_rank": "decode-0",
        "prefill_rank": "prefill-0",
        "prompt_ids": pack_ids([1, 2, 3]),
        "salt": b"salt",
        "fidelity": common_pb2.FIDELITY_EXACT,
        "deadline_unix_ms": 1_030_000,
        "expires_unix_ms": 1_030_000,
    }
    return common_pb2.Ticket(**(fields | changes))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rank_id", ["decode-0", "prefill-0"])
def test_a_signed_ticket_is_believed_by_the_ranks_it_names(rank_id: str) -> None:
    signed = sign_ticket(make_ticket(), SECRET)
    assert verify_ticket_or_raise(signed, SECRET, rank_id=rank_id, clock=StoppedClock()) == make_ticket()


def test_a_changed_byte_another_secret_or_purpose_is_refused() -> None:
    signed = sign_ticket(make_ticket(), SECRET)
    payload = signed.ticket
    forgeries = [
        common_pb2.SignedTicket(ticket=payload + b"\x00", mac=signed.mac),
        common_pb2.SignedTicket(ticket=payload),
        sign_ticket(make_ticket(), ClusterSecret(b"another secret!!")),
        common_pb2.SignedTicket(ticket=payload, mac=SECRET.mac(Purpose.REGISTRATION, payload)),
    ]
    for forgery in forgeries:
        with pytest.raises(AuthenticationError):
            verify_ticket_or_raise(forgery, SECRET, rank_id="decode-0", clock=StoppedClock())


def test_another_ranks_ticket_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="decode-1"):
        verify_ticket_or_raise(sign_ticket(make_ticket(), SECRET), SECRET, rank_id="decode-1", clock=StoppedClock())


def test_an_expired_ticket_is_refused_after_the_allowed_skew() -> None:
    signed = sign_ticket(make_ticket(expires_unix_ms=1_000_000), SECRET)
    verify_ticket_or_raise(signed, SECRET, rank_id="decode-0", clock=StoppedClock(1_000_000 + CLOCK_SKEW_MS))
    with pytest.raises(AuthenticationError, match="expired"):
        verify_ticket_or_raise(signed, SECRET, rank_id="decode-0", clock=StoppedClock(1_000_001 + CLOCK_SKEW_MS))


def test_a_ticket_becomes_an_engine_request() -> None:
    hashes = b"h" * 32 + b"i" * 32
    request = engine_request_from_ticket(
        make_ticket(block_hashes=hashes), namespace=NAMESPACE, work=Work.PREFILL, clock=StoppedClock()
    )
    assert (request.request_id, request.attempt, list(request.prompt_ids)) == (b"r" * 16, 1, [1, 2, 3])
    assert (request.fidelity, request.work, request.await_handoff) == (Fidelity.EXACT, Work.PREFILL, False)
    assert request.deadline.remaining_s() == 30.0
    assert request.chain_root == chain_root(NAMESPACE, salt=b"salt")
    assert list(request.block_hashes) == [b"h" * 32, b"i" * 32]
    assert request.noise_key == noise_key_of_request(RequestId(b"r" * 16))
    assert (request.branch, request.branch_of) == (0, None)


def test_a_choice_names_its_first() -> None:
    ticket = make_ticket(branch=2, branch_of=b"f" * 16)
    request = engine_request_from_ticket(ticket, namespace=NAMESPACE, work=Work.GENERATE, clock=StoppedClock())
    assert (request.branch, request.branch_of) == (2, b"f" * 16)


@pytest.mark.parametrize(
    "changes", [{"request_id": b"short"}, {"attempt": 0}, {"prompt_ids": b"abc"}, {"branch_of": b"f"}]
)
def test_a_malformed_ticket_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidFieldError):
        engine_request_from_ticket(
            make_ticket(**changes), namespace=NAMESPACE, work=Work.GENERATE, clock=StoppedClock()
        )


def test_noise_keys_are_a_fixed_function_of_the_request() -> None:
    digest = hashlib.sha256(b"whalepod noise" + bytes(16)).digest()
    assert noise_key_of_request(RequestId(bytes(16))) == int.from_bytes(digest[:8], "little")


def test_ids_and_hashes_unpack_as_packed() -> None:
    assert pack_ids([1, 2**32 - 1]) == b"\x01\x00\x00\x00\xff\xff\xff\xff"
    assert list(unpack_ids(pack_ids(range(1000)))) == list(range(1000))
    assert unpack_hashes(b"") == []
    with pytest.raises(InvalidFieldError):
        unpack_hashes(b"x" * 33)
