"""The small parts of a snapshot: its stamp, and the sequence state that travels with the rows. Pure bytes.

state   u8 version, u8 flags, u16 top count, u32 L, u32 next token, f32 its log-probability,
        then u32 ids and f32 log-probabilities of the best; little-endian
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from whalepod.kvstore.value_format import BytesLike, SnapshotValue

from .interface import SampledToken, SnapshotKind

VERSION = 1
_HEAD = struct.Struct("<BBHIIf")
_HAS_TOKEN = 1
_HAS_LOGPROB = 2

# Low byte: the kind. High byte: the truncation mode of the rows above the last KV source; there is only `compact`.
_MODES = {SnapshotKind.ENCODER: 0x0001, SnapshotKind.FULL: 0x0102}


def mode_of(kind: SnapshotKind) -> int:
    """The 16-bit stamp of snapshots of this kind."""
    return _MODES[kind]


def kind_of(mode: int) -> SnapshotKind | None:
    """The kind with this stamp; None: not one of ours."""
    return next((kind for kind, stamp in _MODES.items() if stamp == mode), None)


def bytes_of(value: SnapshotValue) -> int:
    """Bytes of all parts."""
    return sum(memoryview(part).nbytes for part in value.parts.values())


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What must be known of a sequence besides its rows. Its next position to be sampled is one after
    `next_token`'s."""

    prompt_tokens: int
    """L: decides which rows exist above the last KV source."""
    next_token: SampledToken | None = None
    """The token at the boundary, if it was drawn."""

    def encode(self) -> bytes:
        token = self.next_token
        if token is None:
            return _HEAD.pack(VERSION, 0, 0, self.prompt_tokens, 0, 0.0)
        flags = _HAS_TOKEN | (_HAS_LOGPROB if token.logprob is not None else 0)
        top = len(token.top_ids)
        head = _HEAD.pack(VERSION, flags, top, self.prompt_tokens, token.id, token.logprob or 0.0)
        return head + struct.pack(f"<{top}I{top}f", *token.top_ids, *token.top_logprobs)

    @classmethod
    def parse(cls, data: BytesLike) -> SequenceState | None:
        """Total: None for bytes that are no state of this version."""
        raw = bytes(data)
        if len(raw) < _HEAD.size:
            return None
        version, flags, top, prompt_tokens, token_id, logprob = _HEAD.unpack_from(raw)
        if version != VERSION or flags & ~(_HAS_TOKEN | _HAS_LOGPROB) or len(raw) != _HEAD.size + 8 * top:
            return None
        if not flags & _HAS_TOKEN:
            return cls(prompt_tokens) if not flags and not top else None
        values = struct.unpack_from(f"<{top}I{top}f", raw, _HEAD.size)
        return cls(
            prompt_tokens,
            SampledToken(
                token_id,
                logprob=logprob if flags & _HAS_LOGPROB else None,
                top_ids=values[:top],
                top_logprobs=values[top:],
            ),
        )
