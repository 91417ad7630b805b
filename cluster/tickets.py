"""Signed tickets: what a router decided about one attempt, in a form that a rank can believe."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import sha256

from whalepod.core.block_keys import HASH_BYTES, BlockHash, chain_root
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError, InvalidFieldError
from whalepod.core.ids import REQUEST_ID_BYTES, RequestId
from whalepod.engine.interface import EngineRequest, Work
from whalepod.kvstore.store_keys import owner_tag
from whalepod.rpc.common.v1 import common_pb2

from .wire import fidelity_from_proto, image_from_proto, sampling_from_proto

CLOCK_SKEW_MS = 5_000
"""How far the clocks of a router and a rank may differ before a fresh ticket looks expired."""


def sign_ticket(ticket: common_pb2.Ticket, secret: ClusterSecret) -> common_pb2.SignedTicket:
    payload = ticket.SerializeToString()
    return common_pb2.SignedTicket(ticket=payload, mac=secret.mac(Purpose.TICKET, payload))


def verify_ticket_or_raise(
    signed: common_pb2.SignedTicket, secret: ClusterSecret, *, rank_id: str, clock: Clock = SYSTEM_CLOCK
) -> common_pb2.Ticket:
    """The ticket, if a process that holds the secret signed it, it has not expired and it names this rank.

    Raises AuthenticationError otherwise.
    """
    if not secret.verifies(Purpose.TICKET, signed.ticket, signed.mac):
        raise AuthenticationError("the ticket's signature is wrong")
    ticket = common_pb2.Ticket.FromString(signed.ticket)
    if clock.unix_ms() > ticket.expires_unix_ms + CLOCK_SKEW_MS:
        raise AuthenticationError("the ticket has expired")
    if rank_id not in (ticket.prefill_rank, ticket.decode_rank):
        raise AuthenticationError(f"the ticket is not for rank {rank_id}")
    return ticket


def engine_request_from_ticket(
    ticket: common_pb2.Ticket, *, namespace: bytes, work: Work, await_handoff: bool = False, clock: Clock = SYSTEM_CLOCK
) -> EngineRequest:
    """What the ticket asks a rank with this 16-byte namespace to do. Raises InvalidFieldError on a malformed ticket."""
    if len(ticket.request_id) != REQUEST_ID_BYTES or ticket.attempt < 1:
        raise InvalidFieldError("ticket", "a ticket needs a 16-byte request id and an attempt of at least 1")
    if len(ticket.branch_of) not in (0, REQUEST_ID_BYTES):
        raise InvalidFieldError("ticket", "a choice names its first choice by a 16-byte request id")
    owner = owner_tag(ticket.tenant)
    return EngineRequest(
        request_id=RequestId(ticket.request_id),
        attempt=ticket.attempt,
        prompt_ids=unpack_ids(ticket.prompt_ids),
        sampling=sampling_from_proto(ticket.sampling),
        fidelity=fidelity_from_proto(ticket.fidelity),
        deadline=Deadline.after((ticket.deadline_unix_ms - clock.unix_ms()) / 1000, clock),
        work=work,
        await_handoff=await_handoff,
        chain_root=chain_root(namespace, salt=ticket.salt),
        block_hashes=unpack_hashes(ticket.block_hashes),
        stored_tokens=ticket.stored_tokens_hint,
        resumed_ids=unpack_ids(ticket.resumed_ids),
        owner=owner,
        traceparent=ticket.traceparent,
        noise_key=noise_key_of_request(RequestId(ticket.request_id)),
        priority=ticket.priority,
        branch=ticket.branch,
        branch_of=RequestId(ticket.branch_of) if ticket.branch_of else None,
        images=tuple(image_from_proto(image, salt=ticket.salt, owner=owner) for image in ticket.images),
        vision_ranks=tuple(ticket.vision_ranks),
    )


def noise_key_of_request(request_id: RequestId) -> int:
    """64-bit key of an unseeded request's noise: the same on every rank that ever runs it (`runtime.md` §4.4)."""
    return int.from_bytes(sha256(b"whalepod noise" + request_id).digest()[:8], "little")


def pack_ids(ids: Sequence[int]) -> bytes:
    """Little-endian uint32. An array of them, as the router holds prompts in, is copied as it is."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> Sequence[int]:
    """The inverse of `pack_ids`, as an array of 4-byte items. Raises InvalidFieldError on a ragged length."""
    if len(data) % 4:
        raise InvalidFieldError("prompt_ids", "packed token ids take 4 bytes each")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def unpack_hashes(data: bytes) -> list[BlockHash]:
    """Raises InvalidFieldError on a ragged length."""
    if len(data) % HASH_BYTES:
        raise InvalidFieldError("block_hashes", f"block hashes take {HASH_BYTES} bytes each")
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]
