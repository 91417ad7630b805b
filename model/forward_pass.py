"""What the layers of one forward hand on to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .batch_plan import BatchPlan, WindowPlan
from .caches import Caches
from .config import ModelConfig
from .context_parallel import SharedRows
from .rotary import RotaryAngles
from .rows import Rows

Recorder = Callable[[str, Tensor], None]
"""Called with a name (`layer3.out`) and a tensor that must not be changed."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What each row attends to, of its window or of global KV; places count, for the order of sums."""

    keys: Tensor
    """[rows, count, head_dim]; zeros where a row has fewer."""
    valid: Tensor
    """[rows, count] bool"""


@dataclass(frozen=True, slots=True)
class PackedSelection:
    """What each row attends to of global KV, where records stay packed."""

    places: Tensor
    """[rows, index_topk] int32: rows of the source's pool, flat over blocks, then -1."""


@dataclass(slots=True)
class ForwardPass:
    """Mutable state of one forward. Layers run in order; each reads and replaces what the one before left."""

    config: ModelConfig
    caches: Caches
    plan: BatchPlan
    frequencies: Mapping[bool, Tensor]
    """Rotary frequencies [pairs] of layers with (True) and without global KV."""
    streams: Tensor
    """[rows, S, D]: the residual streams. Rows are padded (`Rows`), here and in all that is computed from them."""
    pre: Tensor
    """[rows, S]: coefficients that collapse them for the next sublayer, predicted by the sublayer before."""
    rows: Rows
    """The rows in `streams`: all of them below the attention of the last KV source, then the kept ones."""
    text: Tensor | None
    """[rows] bool: which are no part of an image; None: all."""
    memories: Mapping[int, Tensor]
    """Layer -> what its n-gram table holds for the rows, [rows, columns · width]."""
    recorder: Recorder | None = None
    shared: SharedRows | None = None
    """How the rows are divided over ranks, as long as they are."""
    selection: Selection | PackedSelection | None = None
    """The entries that the latest index source chose."""
    candidates: Tensor | None = None
    """[rows, entries] bool: what index sources above the candidate source may choose from."""
    candidate_blocks: Tensor | None = None
    """[rows, blocks] int32: the same as blocks of entries, where records stay packed; None: everything they see."""
    taps: list[Tensor] = field(default_factory=list)
    """Mean streams [rows, D] at the input of each target layer of the drafter so far."""
    angles: dict[bool, RotaryAngles] = field(default_factory=dict)
    entry_angles: dict[int, RotaryAngles] = field(default_factory=dict)
    """By ratio of a KV source, where records stay packed."""
    decoded_index_keys: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Rows without padding."""
        return self.rows.count

    def record(self, name: str, value: Tensor) -> None:
        """Show `value` [rows, ...] to the recorder, without padding."""
        if self.recorder is not None:
            self.recorder(name, value[: self.rows.count])

    def rotary(self, *, compressed: bool) -> RotaryAngles:
        """Angles of the current rows in layers with or without global KV."""
        if compressed not in self.angles:
            positions = self.plan.positions if self.rows is self.plan.every else self.plan.kept_positions
            self.angles[compressed] = RotaryAngles.at(positions, self.frequencies[compressed])
        return self.angles[compressed]

    def window_plan(self, layer: int) -> WindowPlan:
        source = self.config.last_kv_source
        if layer == source:
            return self.plan.gather.source_window
        return self.plan.gather.lower_window if layer < source else self.plan.gather.upper_window

    def all_rows(self, rows: Tensor) -> Tensor:
        """What the caches are written from: rows [rows, …] of this rank -> of all that share the forward."""
        return rows if self.shared is None else self.shared.all_rows(rows)

    def keep(self, x: Tensor) -> Tensor:
        """Go on with the kept rows only. x [rows, ...] -> its kept rows."""
        index = self.plan.kept_index
        if index is None:
            return x
        self.rows = self.plan.kept
        shared, self.shared = self.shared, None
        if shared is not None:
            return self._gather(shared, x, low=int(self.rows.starts[0]))
        self.streams, self.pre = self.streams[index], self.pre[index]
        self.text = None if self.text is None else self.text[index]
        self.taps = [tap[index] for tap in self.taps]
        self.angles.clear()
        return x[index]

    def reunite(self) -> None:
        """After the last layer: rows that were divided to the end are together again."""
        shared, self.shared = self.shared, None
        if shared is not None:
            whole = Rows.between(self.rows.starts, self.rows.ends)
            positions = torch.from_numpy(whole.positions)
            self.plan = replace(self.plan, every=whole, kept=whole, positions=positions, kept_positions=positions)
            self.rows = whole
            self._gather(shared, self.pre, low=int(self.rows.starts[0]))

    def _gather(self, shared: SharedRows, x: Tensor, *, low: int) -> Tensor:
        """Rows from position `low` on, of all ranks, padded as `rows` is."""
        count = len(self.rows.positions)

        def gathered(value: Tensor) -> Tensor:
            rows = shared.all_rows(value, low=low)
            return (
                rows
                if len(rows) in (0, count)
                else torch.cat((rows, rows[-1:].expand(count - len(rows), *rows.shape[1:])))
            )

        self.streams, self.pre = gathered(self.streams), gathered(self.pre)
        self.text = None if self.text is None else gathered(self.text)
        self.taps = [gathered(tap) for tap in self.taps]
        self.angles.clear()
        return gathered(x)
