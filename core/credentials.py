"""Signatures inside the cluster: whoever can write to Redis cannot become a rank (`design.md` §7.8).

A MAC covers what the bytes are (`purpose`) as well as the bytes, so a registration can never pass for a ticket.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from enum import Enum

SECRET_BYTES_MIN = 16


class Purpose(Enum):
    TICKET = b"whalepod ticket v1"
    REGISTRATION = b"whalepod registration v1"
    SALT = b"whalepod salt v1"
    VALUE_KEY = b"whalepod value key v1"
    """Derives the key of the MACs on stored values."""
    GROUP = b"whalepod group v1"
    """What ranks of a pool say to each other about their group."""
    DIRECT_KEY = b"whalepod direct key v1"
    """Derives the key by which ranks that exchange values know each other."""
    FAULT = b"whalepod fault v1"
    IMAGE = b"whalepod image v1"
    """What vision ranks are asked to encode."""


@dataclass(frozen=True, slots=True)
class ClusterSecret:
    """The secret every process of a cluster shares. Raises ValueError if it is shorter than 16 bytes."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < SECRET_BYTES_MIN:
            raise ValueError(f"the cluster secret needs at least {SECRET_BYTES_MIN} bytes, not {len(self.key)}")

    def mac(self, purpose: Purpose, payload: bytes) -> bytes:
        """32 bytes."""
        head = len(purpose.value).to_bytes(2, "little") + purpose.value
        return hmac.digest(self.key, head + payload, "sha256")

    def verifies(self, purpose: Purpose, payload: bytes, mac: bytes) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(self.mac(purpose, payload), mac)
