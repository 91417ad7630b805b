"""The canary's own check: a hand-off whose windows were zeroed on the way must be seen as a difference.

Plays the router for one request, so that it stands between READY and restore:

    prefill.Run ──▶ READY; here the snapshot in the store is replaced by a valid one with zeroed windows ──▶ decode

No production path knows of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Final

import grpc
import redis.asyncio as aioredis

from whalepod.core.block_keys import chain_root, derive_block_hashes
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import InternalError
from whalepod.core.ids import RequestId, mint_request_id
from whalepod.engine.interface import Fidelity, FinishedEvent, PromptTokensEvent, SampledToken, TokensEvent
from whalepod.kvstore.store_keys import handoff_snapshot_key
from whalepod.kvstore.value_format import (
    HEADER_BYTES,
    Flag,
    PartKind,
    Refusal,
    encode_header,
    parse_header,
    payload_checksum,
)
from whalepod.rpc.common.v1 import common_pb2
from whalepod.rpc.decode.v1 import decode_pb2, decode_pb2_grpc
from whalepod.rpc.prefill.v1 import prefill_pb2, prefill_pb2_grpc

from .canary_cases import CanaryCase
from .peer_tls import PeerTls, open_channel
from .registration import RankInfo
from .step_message import decode_step
from .tickets import pack_ids, sign_ticket
from .wire import FIDELITIES, sampling_to_proto

TIMEOUT_S: Final = 120.0
ATTEMPT: Final = 1
ZEROED_PARTS: Final = (PartKind.WINDOW_ROWS, PartKind.DRAFT_ROWS)


@dataclass(frozen=True, slots=True)
class ControlCluster:
    """Where the control's request runs."""

    prefill: RankInfo
    decode: RankInfo
    secret: ClusterSecret
    redis_url: str
    block_tokens: int
    tls: PeerTls | None


async def run_handoff(
    cluster: ControlCluster, case: CanaryCase, *, fidelity: Fidelity, zero_windows: bool
) -> list[SampledToken]:
    """Tokens of `case`, prefilled on one rank and decoded on the other, its snapshot spoilt in between or not.

    Raises InternalError if the request fails or nothing was handed off.
    """
    request_id = mint_request_id()
    ticket = _sign(cluster, case, request_id, fidelity)
    async with (
        asyncio.timeout(TIMEOUT_S),
        open_channel(cluster.prefill.address, cluster.tls) as prefill_channel,
        open_channel(cluster.decode.address, cluster.tls) as decode_channel,
    ):
        prefill = prefill_pb2_grpc.PrefillServiceStub(prefill_channel)
        ready = await prefill.Run(prefill_pb2.RunRequest(ticket=ticket))
        if not ready.stored or not ready.boundary_tokens:
            raise InternalError("the control's prompt was not handed off")
        if zero_windows:
            await _zero_windows(cluster.redis_url, request_id)
        return [token async for token in _decode(decode_channel, ticket, request_id, ready)]


def zeroed(value: bytes) -> bytes:
    """The same snapshot, as valid as before, with every window row zero. Raises InternalError if it is no snapshot."""
    header = parse_header(value)
    if isinstance(header, Refusal):
        raise InternalError(f"the control's snapshot is not valid: {header.value}")
    payload = bytearray(value[HEADER_BYTES:])
    for part in header.parts:
        if part.kind in ZEROED_PARTS:
            payload[part.offset_bytes : part.offset_bytes + part.bytes] = bytes(part.bytes)
    checksum = payload_checksum([payload], crc=bool(header.flags & Flag.CRC32C))
    return encode_header(replace(header, checksum=checksum)) + payload


async def _zero_windows(redis_url: str, request_id: RequestId) -> None:
    key = handoff_snapshot_key(request_id, ATTEMPT)
    async with aioredis.Redis.from_url(redis_url) as client:
        value = await client.get(key)
        if value is None:
            raise InternalError("the control's snapshot is not in the store")
        await client.set(key, zeroed(value), keepttl=True)


async def _decode(
    channel: grpc.aio.Channel,
    ticket: common_pb2.SignedTicket,
    request_id: RequestId,
    ready: prefill_pb2.RunResponse,
) -> AsyncIterator[SampledToken]:
    finished = asyncio.Event()

    async def requests() -> AsyncIterator[decode_pb2.GenerateRequest]:
        yield decode_pb2.GenerateRequest(start=decode_pb2.Start(ticket=ticket))
        handed_off = decode_pb2.Ready(request_id=request_id, attempt=ATTEMPT, result=ready)
        yield decode_pb2.GenerateRequest(ready=handed_off)
        await finished.wait()

    async for message in decode_pb2_grpc.DecodeServiceStub(channel).Generate(requests()):
        for event in decode_step(message.packed_step).events:
            match event:
                case TokensEvent():
                    for token in event.tokens:
                        yield token
                case PromptTokensEvent():
                    pass  # no case asks for them
                case FinishedEvent():
                    finished.set()
                    if event.error is not None:
                        raise InternalError(f"the control's request failed: {event.error}") from event.error


def _sign(
    cluster: ControlCluster, case: CanaryCase, request_id: RequestId, fidelity: Fidelity
) -> common_pb2.SignedTicket:
    salt = bytes(request_id)
    root = chain_root(cluster.decode.namespace, salt=salt)
    hashes = derive_block_hashes(case.prompt_ids, root=root, block_tokens=cluster.block_tokens)
    until_unix_ms = SYSTEM_CLOCK.unix_ms() + int(TIMEOUT_S * 1000)
    ticket = common_pb2.Ticket(
        request_id=request_id,
        attempt=ATTEMPT,
        model=cluster.decode.model,
        salt=salt,
        fidelity=FIDELITIES[fidelity],
        prompt_ids=pack_ids(case.prompt_ids),
        block_hashes=b"".join(hashes),
        sampling=sampling_to_proto(case.sampling),
        deadline_unix_ms=until_unix_ms,
        prefill_rank=cluster.prefill.rank_id,
        decode_rank=cluster.decode.rank_id,
        expires_unix_ms=until_unix_ms,
    )
    return sign_ticket(ticket, cluster.secret)
