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
    """The secret every process of a cluster shares, and, while it is being replaced, those that others still sign or
    sign already with. Raises ValueError if one is shorter than 16 bytes."""

    key: bytes = field(repr=False)
    also_believed: tuple[bytes, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for key in self._keys:
            if len(key) < SECRET_BYTES_MIN:
                raise ValueError(f"the cluster secret needs at least {SECRET_BYTES_MIN} bytes, not {len(key)}")

    @classmethod
    def parse(cls, text: bytes) -> ClusterSecret:
        """One secret a line, the own one first. Raises ValueError."""
        key, *others = [line.strip() for line in text.splitlines() if line.strip()] or [b""]
        return cls(key, tuple(others))

    @property
    def text(self) -> bytes:
        """What `parse` reads."""
        return b"\n".join(self._keys)

    @property
    def _keys(self) -> tuple[bytes, ...]:
        return self.key, *self.also_believed

    def mac(self, purpose: Purpose, payload: bytes) -> bytes:
        """32 bytes."""
        return _mac(self.key, purpose, payload)

    def verifies(self, purpose: Purpose, payload: bytes, mac: bytes) -> bool:
        """Compares in constant time."""
        return any(hmac.compare_digest(_mac(key, purpose, payload), mac) for key in self._keys)


def _mac(key: bytes, purpose: Purpose, payload: bytes) -> bytes:
    head = len(purpose.value).to_bytes(2, "little") + purpose.value
    return hmac.digest(key, head + payload, "sha256")
