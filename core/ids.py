"""Identifiers. A client's `X-Request-Id` is echoed but never used as one of these."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", bytes)
"""16 random bytes, minted by the router (or by `LLM`), unique for ever."""

RankId = NewType("RankId", str)
"""Names one rank of one pool, e.g. `decode-0`. Stable over restarts; the incarnation is not."""

Incarnation = NewType("Incarnation", int)
"""64 random bits drawn when a process starts: tells a restarted rank from the one before it."""

REQUEST_ID_BYTES = 16
NONCE_BYTES = 32


def mint_request_id() -> RequestId:
    return RequestId(secrets.token_bytes(REQUEST_ID_BYTES))


def mint_incarnation() -> Incarnation:
    return Incarnation(secrets.randbits(63))


def mint_nonce() -> bytes:
    """32 random bytes that were never used before: makes a proof worthless to whoever overhears it."""
    return secrets.token_bytes(NONCE_BYTES)


def mint_cluster_secret() -> str:
    """64 hexadecimal digits, for a cluster that was not given a secret."""
    return secrets.token_hex(32)


def mint_api_key() -> str:
    """A key for one client: 256 random bits, recognisable by its first letters where it should not be."""
    return "wp-" + secrets.token_urlsafe(32)
