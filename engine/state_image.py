"""Turns blocks and windows on the device into the bytes of the store and back: the only place besides the network that
touches cache memory.

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

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.quantise import PackedFormat
from whalepod.kvstore.value_format import BlockLayout, BytesLike, FormatId, PartKind, SnapshotValue
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.record_formats import RecordFormat

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
    parts: Mapping[PartKind, Tensor]
    """uint8."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some records of one layer: which, and where their codes end and their scales begin."""

    records: Tensor
    """[rows, record_bytes] uint8, a view of the caches."""
    index: Tensor
    """[wanted rows] int64."""
    code_bytes: int

    @property
    def bytes(self) -> int:
        return len(self.index) * self.records.shape[1]

    def read(self) -> tuple[Tensor, Tensor]:
        """All codes, all scales; flat."""
        rows = self.records[self.index]
        return rows[:, : self.code_bytes].reshape(-1), rows[:, self.code_bytes :].reshape(-1)

    def write(self, data: Tensor) -> None:
        """`data` [bytes] uint8, as `read` gives it."""
        count, width, device = len(self.index), self.records.shape[1], self.records.device
        codes = count * self.code_bytes
        self.records[self.index, : self.code_bytes] = data[:codes].view(count, self.code_bytes).to(device)
        self.records[self.index, self.code_bytes :] = data[codes:].view(count, width - self.code_bytes).to(device)


class StateImage:
    """Of one rank's caches. Belongs to the thread that runs the model."""

    def __init__(self, caches: Caches, config: ModelConfig) -> None:
        self._caches = caches
        self._config = config
        self.block_layout = block_layout(caches)

    def export_block(self, block_id: int) -> memoryview:
        """A full block's payload, copied."""
        return _gather(self._entries(block_id, tokens=self._caches.block_tokens))

    def import_block(self, block_id: int, payload: BytesLike) -> None:
        """Overwrite a block with a payload of `block_layout.payload_bytes`."""
        _scatter(self._entries(block_id, tokens=self._caches.block_tokens), _bytes_tensor(payload))

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
    ) -> SnapshotValue:
        """A copy of the state at `boundary`. Exactly the rows below it have been computed, or at most K - W + 1
        more."""
        rows = self._parts(kind, slot, self._block_at(boundary, blocks), boundary)
        state = SequenceState(prompt_tokens, next_token).encode()
        return SnapshotValue(
            boundary_tokens=boundary,
            mode=mode_of(kind),
            parts={part: _gather(rows[part]) for part in rows} | {PartKind.STATE: state},
            valid_from=max(0, boundary - self._config.window + 1),
            exact=exact,
            draft_fingerprint=DRAFT_OF_THE_NAMESPACE if PartKind.DRAFT_ROWS in rows else 0,
        )

    def parse(self, value: SnapshotValue) -> Snapshot | None:
        """None unless it is a whole snapshot of this model's shape that these caches can hold."""
        kind, boundary = kind_of(value.mode), value.boundary_tokens
        if kind is None or not 0 < boundary <= POSITION_MAX or not self._can_hold(kind):
            return None
        state = SequenceState.parse(value.parts.get(PartKind.STATE, b""))
        rows = self._parts(kind, 0, 0, boundary)
        wanted = {part: sum(layer.bytes for layer in rows[part]) for part in rows}
        found = {part: memoryview(data).nbytes for part, data in value.parts.items() if part != PartKind.STATE}
        if state is None or found != wanted:
            return None
        parts = {part: _bytes_tensor(value.parts[part]) for part in wanted}
        return Snapshot(kind=kind, boundary=boundary, exact=value.exact, state=state, parts=parts)

    def import_snapshot(self, snapshot: Snapshot, *, slot: int, blocks: Sequence[int]) -> None:
        """Write a snapshot's rows into a slot, and into the block that holds its boundary."""
        block_id = self._block_at(snapshot.boundary, blocks)
        for part, rows in self._parts(snapshot.kind, slot, block_id, snapshot.boundary).items():
            _scatter(rows, snapshot.parts[part])

    def _can_hold(self, kind: SnapshotKind) -> bool:
        return kind is SnapshotKind.ENCODER or len(self._caches.windows) == self._config.num_hidden_layers

    def _block_at(self, position: int, blocks: Sequence[int]) -> int:
        """The block that the partial entries below `position` are in; any, if there are none."""
        return blocks[position // self._caches.block_tokens] if position % self._caches.block_tokens else 0

    def _parts(self, kind: SnapshotKind, slot: int, block_id: int, boundary: int) -> dict[PartKind, list[_Rows]]:
        """The rows of each part that is not empty, in the order of its bytes."""
        caches, window = self._caches, self._config.window
        full = kind is SnapshotKind.FULL
        layers = range(self._config.num_hidden_layers if full else self._config.last_kv_source + 1)
        entries = self._entries(block_id, tokens=boundary % caches.block_tokens)
        half = len(entries) // 2
        parts = {
            PartKind.GLOBAL_KV: entries[:half],
            PartKind.INDEX_KEYS: entries[half:],
            PartKind.WINDOW_ROWS: [
                self._ring(caches.windows[layer], slot, range(max(0, boundary - window + 1), boundary))
                for layer in layers
            ],
            PartKind.DRAFT_ROWS: [
                self._ring(caches.draft_windows[block], slot, range(max(0, boundary - window), boundary))
                for block in sorted(caches.draft_windows if full else ())
            ],
            PartKind.GROUP_STATE: [self._group(source, slot, boundary) for source in sorted(caches.groups)],
        }
        return {part: rows for part, rows in parts.items() if any(layer.bytes for layer in rows)}

    def _entries(self, block_id: int, *, tokens: int) -> list[_Rows]:
        """The first entries of a block: KV of each source, then index keys of each."""
        caches, config = self._caches, self._config
        pools = [
            (caches.global_kv, _code_bytes(caches.formats.global_kv, config.head_dim)),
            (caches.index_keys, _code_bytes(caches.formats.index_key, config.index_head_dim)),
        ]
        return [
            _Rows(
                records=pool[source].flatten(0, 1),
                index=block_id * pool[source].shape[1] + torch.arange(tokens // config.ratio(source)),
                code_bytes=code_bytes,
            )
            for pool, code_bytes in pools
            for source in sorted(pool)
        ]

    def _ring(self, ring: Tensor, slot: int, positions: range) -> _Rows:
        """Window rows of some positions."""
        index = slot * ring.shape[1] + torch.tensor(positions, dtype=torch.int64) % ring.shape[1]
        return _Rows(ring.flatten(0, 1), index, _code_bytes(self._caches.formats.window, self._config.head_dim))

    def _group(self, source: int, slot: int, boundary: int) -> _Rows:
        """Raw rows of a source's unfinished group."""
        ring = self._caches.groups[source]
        records = ring.flatten(2).view(torch.uint8).flatten(0, 1)
        positions = torch.arange(boundary - boundary % self._config.ratio(source), boundary)
        return _Rows(records, slot * ring.shape[1] + positions % ring.shape[1], records.shape[1])


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


def _gather(rows: Sequence[_Rows]) -> memoryview:
    joined = torch.cat([piece for layer in rows for piece in layer.read()]).cpu()
    return memoryview(joined.numpy())  # pyright: ignore[reportArgumentType]  (numpy's stubs know no buffers before 3.12)


def _scatter(rows: Sequence[_Rows], data: Tensor) -> None:
    offset = 0
    for layer in rows:
        layer.write(data[offset : offset + layer.bytes])
        offset += layer.bytes


def _bytes_tensor(data: BytesLike) -> Tensor:
    """[bytes] uint8. Shares memory with a writable buffer."""
    array = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
