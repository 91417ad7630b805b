"""Who wrote a value: a MAC under a key that the processes of one cluster share (`kvstore.md` §12).

    mac = HMAC-SHA-256(key, header without its two checksums ‖ payload)

The checksums are left out because they cover the MAC. Whoever can write to the store, but does not know the key, cannot
make a value that is used.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from .value_format import EXTENSION_BYTES, BytesLike

MAC_BYTES = 32
KEY_BYTES_MIN = 16
_CHECKSUM = slice(112, 120)
_HEADER_CHECKSUM_AT = 252


@dataclass(frozen=True, slots=True)
class ValueMac:
    """Raises ValueError on a key of fewer than 16 bytes."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < KEY_BYTES_MIN:
            raise ValueError(f"a MAC key needs at least {KEY_BYTES_MIN} bytes, not {len(self.key)}")

    def extension(self, head: bytes, payload: Iterable[BytesLike]) -> bytes:
        """What follows the 256-byte header `head`, whose checksums do not matter."""
        return self._mac(head, payload).ljust(EXTENSION_BYTES, b"\0")

    def verifies(self, head: bytes, payload: Iterable[BytesLike], extension: BytesLike) -> bool:
        """Compares in constant time."""
        return hmac.compare_digest(self._mac(head, payload), bytes(extension[:MAC_BYTES]))

    def _mac(self, head: bytes, payload: Iterable[BytesLike]) -> bytes:
        mac = hmac.new(self.key, head[: _CHECKSUM.start], hashlib.sha256)
        mac.update(head[_CHECKSUM.stop : _HEADER_CHECKSUM_AT])
        for piece in payload:
            mac.update(piece)
        return mac.digest()
