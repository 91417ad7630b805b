"""How two ranks convince each other that both belong to the cluster, before any value moves.

    reader ── HELLO n1 ─────────────────────────────▶ holder      n1, n2: 32 random bytes each
    reader ◀── [n2, HMAC(key, "holder" ‖ n1 ‖ n2)] ── holder      the reader goes away unless this is right
    reader ── AUTH HMAC(key, "reader" ‖ n1 ‖ n2) ───▶ holder      the holder closes unless this is right

`key` is derived from the cluster's secret. What follows is neither encrypted nor signed: between hosts, values carry a
MAC of their own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from whalepod.core.clock import Deadline
from whalepod.core.ids import NONCE_BYTES, mint_nonce

from .faults import FaultReason, StoreFault
from .resp import RespConnection, command


def proof(key: bytes, role: bytes, reader_nonce: bytes, holder_nonce: bytes) -> bytes:
    """32 bytes that only a process with the key can make, and only for these nonces."""
    return hmac.digest(key, role + reader_nonce + holder_nonce, hashlib.sha256)


def greeting(key: bytes) -> Callable[[RespConnection, Deadline], None]:
    """What a reader says first on a new connection."""

    def greet(connection: RespConnection, deadline: Deadline) -> None:
        mine = mint_nonce()
        connection.send([command(b"HELLO", mine)], deadline=deadline)
        match connection.read_reply(deadline=deadline):
            case [bytes(theirs), bytes(shown)] if len(theirs) == NONCE_BYTES:
                if not hmac.compare_digest(shown, proof(key, b"holder", mine, theirs)):
                    raise StoreFault(FaultReason.REFUSED, "the rank does not know the cluster's secret")
            case _:
                raise StoreFault(FaultReason.PROTOCOL, "a rank was expected")
        connection.send([command(b"AUTH", proof(key, b"reader", mine, theirs))], deadline=deadline)
        if connection.read_reply(deadline=deadline) != b"OK":
            raise StoreFault(FaultReason.REFUSED, "the rank does not take our word")

    return greet
