"""The memory that a model's rows live in. Addressed by position; nothing in it says whether a row is valid.

    window row of position p          windows[layer][slot, p mod ring_rows]
    entry j of a KV source            global_kv[source][block_table[j // entries a block], j mod entries a block]
    its index key                     index_keys[source][…the same…]
    raw row of position p (r > 1)     groups[source][slot, p mod group_ring_rows]

A sequence owns its slot and its blocks. Rolling back is forgetting: rows past the end are overwritten before a reader's
position lets them be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from whalepod.core.errors import ConfigError

from .config import ModelConfig
from .record_formats import CacheFormats, RecordFormat
from .tensor_layout import ModelRole


@dataclass(frozen=True, slots=True)
class Caches:
    """Every tensor by layer (or draft block). Records are packed bytes, decoded by `formats`."""

    formats: CacheFormats
    block_tokens: int
    ring_rows: int
    """Window rows kept per slot, at least K: the last K rows can be copied, and forgotten, at any time."""
    group_ring_rows: int
    """Raw rows kept per slot: an unfinished group survives the rows of two rejected steps."""
    global_kv: Mapping[int, Tensor]
    """KV source -> [blocks, block_tokens / ratio, record_bytes] uint8."""
    index_keys: Mapping[int, Tensor]
    """KV source -> [blocks, block_tokens / ratio, record_bytes] uint8."""
    windows: Mapping[int, Tensor]
    """Layer -> [slots, ring_rows, record_bytes] uint8."""
    draft_windows: Mapping[int, Tensor]
    """Draft block -> [slots, ring_rows, record_bytes] uint8."""
    groups: Mapping[int, Tensor]
    """KV source with ratio > 1 -> [slots, group_ring_rows, 2, head_dim]: pooled projection, gate score."""

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        blocks: int,
        slots: int,
        formats: CacheFormats,
        block_tokens: int | None = None,
        ring_rows: int | None = None,
        role: ModelRole = ModelRole.FULL,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Zeroed caches for `blocks` blocks and `slots` sequences. `dtype` is that of unfinished groups.

        `block_tokens` and `ring_rows` default to the model's B and K. Role `encoder` has no layer above the last KV
        source and no draft blocks. Raises ConfigError if a format or a size does not fit the model.
        """
        tokens = config.block_tokens if block_tokens is None else block_tokens
        ring = config.kept_rows if ring_rows is None else ring_rows
        if tokens <= 0 or tokens % config.group_tokens:
            raise ConfigError(f"block_tokens {tokens} must be a positive multiple of {config.group_tokens}")
        if ring < config.kept_rows:
            raise ConfigError(f"ring_rows {ring} must be at least the model's kept rows, {config.kept_rows}")
        full = role is ModelRole.FULL
        layers = config.num_hidden_layers if full else config.last_kv_source + 1
        sources = config.kv_source_layer_ids
        group_ring = max(config.ratio(source) for source in sources) + 2 * (config.dspark_block_size + 1)
        window = _record_bytes(formats.window, config.head_dim, "head_dim")
        entry = _record_bytes(formats.global_kv, config.head_dim, "head_dim")
        key = _record_bytes(formats.index_key, config.index_head_dim, "index_head_dim")

        def records(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.uint8, device=device)

        return cls(
            formats=formats,
            block_tokens=tokens,
            ring_rows=ring,
            group_ring_rows=group_ring,
            global_kv={source: records(blocks, tokens // config.ratio(source), entry) for source in sources},
            index_keys={source: records(blocks, tokens // config.ratio(source), key) for source in sources},
            windows={layer: records(slots, ring, window) for layer in range(layers)},
            draft_windows={
                block: records(slots, ring, window) for block in range(config.num_nextn_predict_layers if full else 0)
            },
            groups={
                source: torch.zeros(slots, group_ring, 2, config.head_dim, dtype=dtype, device=device)
                for source in sources
                if config.ratio(source) > 1
            },
        )

    @property
    def device(self) -> torch.device:
        return self.windows[0].device

    @property
    def bytes_per_block(self) -> int:
        """Global KV and index keys of one block, over all sources."""
        return sum(pool[0].numel() for pools in (self.global_kv, self.index_keys) for pool in pools.values())

    @property
    def bytes_per_slot(self) -> int:
        """Window rings, draft windows and unfinished groups of one sequence."""
        rings = (self.windows, self.draft_windows, self.groups)
        return sum(ring[0].numel() * ring.element_size() for kind in rings for ring in kind.values())


def _record_bytes(record_format: RecordFormat, width: int, field: str) -> int:
    try:
        return record_format.record_bytes(width)
    except ValueError as error:
        raise ConfigError(f"quantised caches do not fit {field} {width}: {error}") from error
