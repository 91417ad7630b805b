"""Which models may exchange bytes: everything that must match, hashed into 16 bytes (`kvstore.md` §2.1).

    ns = SHA-256(canonical encoding)[:16]

The canonical encoding is the fields in their order here, each framed by its length (u32, little-endian). Inside a
frame: text is UTF-8; an integer is 8 bytes, signed, a real number 8 bytes IEEE 754, both little-endian; a truth value
is one byte; a list is its length (u32) and its framed items; a mapping is the list of its names and values in turn,
names ascending. Parallel sizes and the engine's build are left out: a block is the same object whoever wrote it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from whalepod.core.block_keys import NAMESPACE_BYTES, frame

SCHEMA_VERSION = 1

Field = str | bytes | bool | int | float | Sequence["Field"] | Mapping[str, "Field"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """What is behind a namespace id. New weights are a new namespace, always.

    Its fields' order is part of the encoding: a new field comes last and raises `SCHEMA_VERSION`.
    """

    model_id: str
    weights_fingerprint: bytes
    """Over the names and hashes of the checkpoint's shards, draft included."""
    prompt_version: str
    """Tokenizer and prompt encoder."""
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    window_tokens: int
    rope: Mapping[str, str | int | float]
    record_formats: Mapping[str, str]
    """Logical type of each kind of record, by the names of `value_format.PartKind`; not its storage type."""
    block_tokens: int
    layout: str
    truncation: str
    """`compact` or `off` (`design.md` §4)."""
    kept_rows: int
    """K."""
    has_draft: bool
    endianness: str = "little"
    numerics: str = ""
    """Kernel family where results must match bit for bit across machines, else empty."""

    @property
    def id(self) -> bytes:
        """16 bytes."""
        return hashlib.sha256(canonical_encoding(self)).digest()[:NAMESPACE_BYTES]


def canonical_encoding(namespace: Namespace) -> bytes:
    return b"".join(frame(_encoded(value)) for value in (SCHEMA_VERSION, *_fields(namespace)))


def _fields(namespace: Namespace) -> tuple[Field, ...]:
    return astuple(namespace)


def _encoded(value: Field) -> bytes:
    match value:
        case bytes():
            return value
        case str():
            return value.encode()
        case bool():  # before int, of which it is one
            return bytes([value])
        case int():
            return struct.pack("<q", value)
        case float():
            return struct.pack("<d", value)
        case Mapping():
            return _encoded([item for name in sorted(value) for item in (name, value[name])])
        case _:
            return struct.pack("<I", len(value)) + b"".join(frame(_encoded(item)) for item in value)
