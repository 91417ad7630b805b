"""Turns blocks and windows on the device into the bytes of the store and back: which records, in which order
(`host_copies.py` moves them).

    block      global KV of each source, then index keys of each (`kvstore.md` §3.3)
    snapshot   at boundary n: window rows n - W + 1 … n - 1 of each layer, draft rows n - W … n - 1 of each draft
               block, entries and index keys of the unfinished block, raw rows of unfinished groups, state of the
               sequence (`design.md` §4)

Within one layer all codes come first, token by token, then all scales. Bytes that come back are checked for their size
before anything is written: they are a snapshot or they are None, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from whalepod.kernels.quantise import PackedFormat
from whalepod.kernels.record_runs import RecordPool, RecordRun, runs_bytes
from whalepod.kvstore.value_format import BlockLayout, BytesLike, FormatId, PartKind, SnapshotValue
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import RecordFormat

from .host_copies import Bytes, Copied, HostCopies
from .interface import SampledToken, SnapshotKind
from .snapshot_format import SequenceState, kind_of, mode_of

# Other formats are for comparisons in one process and never reach a store.
_FORMAT_IDS = {"release": FormatId.RELEASE, "plain-float32": FormatId.FLOAT32, "plain-bfloat16": FormatId.BFLOAT16}
POSITION_MAX = 2**31 - 1
DRAFT_OF_THE_NAMESPACE = 1
"""The namespace names the drafter's weights with all others; this says only that draft rows are present."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A well-formed snapshot of this model: every part has the size that its kind and boundary ask for."""

    kind: SnapshotKind
    boundary: int
    exact: bool
    state: SequenceState
    parts: Mapping[PartKind, Bytes]


class StateImage:
    """Of one rank's caches. Belongs to the engine's thread."""

    def __init__(self, caches: Caches, config: ModelConfig) -> None:
        self._caches = caches
        self._config = config
        self.copies = HostCopies(caches.device)
        window_codes = _code_bytes(caches.formats.window, config.head_dim)
        self._windows, self._drafts = (
            {layer: RecordPool(ring, window_codes) for layer, ring in rings.items()}
            for rings in (caches.windows, caches.draft_windows)
        )
        self._entry_pools = [
            (RecordPool(pool[source], code_bytes), config.ratio(source))
            for pool, code_bytes in (
                (caches.global_kv, _code_bytes(caches.formats.global_kv, config.head_dim)),
                (caches.index_keys, _code_bytes(caches.formats.index_key, config.index_head_dim)),
            )
            for source in sorted(pool)
        ]
        """KV of each source, then index keys of each, with the source's ratio."""
        raw = {source: caches.groups[source].flatten(2).view(torch.uint8) for source in sorted(caches.groups)}
        self._groups = {source: RecordPool(rows, rows.shape[2]) for source, rows in raw.items()}
        self.block_layout = block_layout(caches)

    def export_block(self, block_id: int) -> Copied[memoryview]:
        """A full block's payload, copied."""
        return self.copies.read(self._entries(block_id, tokens=self._caches.block_tokens))

    def import_block(self, block_id: int, payload: BytesLike) -> None:
        """Overwrite a block with a payload of `block_layout.payload_bytes`."""
        self.copies.write(self._entries(block_id, tokens=self._caches.block_tokens), [_array(payload)])

    def export_snapshot(
        self,
        kind: SnapshotKind,
        *,
        slot: int,
        blocks: Sequence[int],
        boundary: int,
        prompt_tokens: int,
        exact: bool = True,
        next_token: SampledToken | None = None,
    ) -> Copied[SnapshotValue]:
        """A copy of the state at `boundary`. Exactly the rows below it have been computed, or at most K - W + 1
        more."""
        parts = self._parts(kind, slot, self._block_at(boundary, blocks), boundary)
        state = SequenceState(prompt_tokens, next_token).encode()

        def snapshot(data: memoryview) -> SnapshotValue:
            sizes = [runs_bytes(runs) for runs in parts.values()]
            ends = list(accumulate(sizes))
            pieces = {part: data[end - size : end] for part, size, end in zip(parts, sizes, ends, strict=True)}
            return SnapshotValue(
                boundary_tokens=boundary,
                mode=mode_of(kind),
                parts=pieces | {PartKind.STATE: state},
                valid_from=max(0, boundary - self._config.window + 1),
                exact=exact,
                draft_fingerprint=DRAFT_OF_THE_NAMESPACE if PartKind.DRAFT_ROWS in parts else 0,
            )

        return self.copies.read([run for runs in parts.values() for run in runs]).made(snapshot)

    def parse(self, value: SnapshotValue) -> Snapshot | None:
        """None unless it is a whole snapshot of this model's shape that these caches can hold."""
        kind, boundary = kind_of(value.mode), value.boundary_tokens
        if kind is None or not 0 < boundary <= POSITION_MAX or not self._can_hold(kind):
            return None
        state = SequenceState.parse(value.parts.get(PartKind.STATE, b""))
        wanted = {part: runs_bytes(runs) for part, runs in self._parts(kind, 0, 0, boundary).items()}
        found = {part: memoryview(data).nbytes for part, data in value.parts.items() if part != PartKind.STATE}
        if state is None or found != wanted:
            return None
        parts = {part: _array(value.parts[part]) for part in wanted}
        return Snapshot(kind=kind, boundary=boundary, exact=value.exact, state=state, parts=parts)

    def import_snapshot(self, snapshot: Snapshot, *, slot: int, blocks: Sequence[int]) -> None:
        """Write a snapshot's rows into a slot, and into the block that holds its boundary."""
        parts = self._parts(snapshot.kind, slot, self._block_at(snapshot.boundary, blocks), snapshot.boundary)
        runs = [run for part in parts.values() for run in part]
        self.copies.write(runs, [snapshot.parts[part] for part in parts])

    def _can_hold(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.ENCODER or len(self._caches.windows) == self._config.num_hidden_layers

    def _block_at(self, position: int, blocks: Sequence[int]) -> int:
        """The block that the partial entries below `position` are in; any, if there are none."""
        return blocks[position // self._caches.block_tokens] if position % self._caches.block_tokens else 0

    def _parts(self, kind: SnapshotKind, slot: int, block_id: int, boundary: int) -> dict[PartKind, list[RecordRun]]:
        """The records of each part that is not empty, in the order of its bytes."""
        window = self._config.window
        full = kind is SnapshotKind.FULL
        layers = range(self._config.num_hidden_layers if full else self._config.last_kv_source + 1)
        entries = self._entries(block_id, tokens=boundary % self._caches.block_tokens)
        half = len(entries) // 2
        kept, drafted = max(0, boundary - window + 1), max(0, boundary - window)
        parts = {
            PartKind.GLOBAL_KV: entries[:half],
            PartKind.INDEX_KEYS: entries[half:],
            PartKind.WINDOW_ROWS: [self._ring(self._windows[layer], slot, kept, boundary) for layer in layers],
            PartKind.DRAFT_ROWS: [
                self._ring(self._drafts[block], slot, drafted, boundary)
                for block in sorted(self._drafts if full else ())
            ],
            PartKind.GROUP_STATE: [self._group(source, slot, boundary) for source in self._groups],
        }
        return {part: runs for part, runs in parts.items() if runs_bytes(runs)}

    def _entries(self, block_id: int, *, tokens: int) -> list[RecordRun]:
        """The first entries of a block: KV of each source, then index keys of each."""
        return [RecordRun(pool, block_id, 0, tokens // ratio) for pool, ratio in self._entry_pools]

    def _ring(self, pool: RecordPool, slot: int, start: int, end: int) -> RecordRun:
        """Window rows of positions start … end - 1."""
        return RecordRun(pool, slot, start, end - start)

    def _group(self, source: int, slot: int, boundary: int) -> RecordRun:
        """Raw rows of a source's unfinished group."""
        count = boundary % self._config.ratio(source)
        return RecordRun(self._groups[source], slot, boundary - count, count)


def block_layout(caches: Caches) -> BlockLayout:
    """What a block of these caches looks like in the store."""
    return BlockLayout.from_layers(
        block_tokens=caches.block_tokens,
        format_id=_FORMAT_IDS.get(caches.formats.name, 0),
        global_kv={source: pool[0].numel() for source, pool in caches.global_kv.items()},
        index_keys={source: pool[0].numel() for source, pool in caches.index_keys.items()},
    )


def _code_bytes(record_format: RecordFormat, width: int) -> int:
    """Bytes of a record before its scales."""
    scales = width // record_format.group if isinstance(record_format, PackedFormat) else 0
    return record_format.record_bytes(width) - scales


def _array(data: BytesLike) -> Bytes:
    """The same memory."""
    return np.frombuffer(data, dtype=np.uint8)
