"""Stands in for the network: every row is a hash of exactly what the real one may look at, kept in the real caches.

    tokens back to the n-gram's ─▶ layer 0 ─ window rows ─▶ layer 1 ─ … ─ entries of the sources ─▶ … ─▶ logits

A row of a layer depends on the W rows of its window below (from `window_start` or the floor on) and on all entries of
its source before it, a sum over both. So a window row that was not restored, a replay that is too short, a block under
another's id or a stale entry gives other tokens, as with the real network, at a hundredth of its price.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.engine.device import LaunchedRows
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.draft import Anchor, Chooser, Drafts

Hashes = NDArray[np.uint64]

TABLE_ROWS = 256
SALTS = np.arange(1, 1000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
"""What hashes of one kind and layer begin with."""
WINDOW, RAW, KEY = 100, 200, 300


class HashNetwork:
    """Of one rank's caches, which hold all layers, on the CPU."""

    def __init__(self, caches: Caches, config: ModelConfig) -> None:
        self._config = config
        self._caches = caches
        self._windows = {layer: _words(ring) for layer, ring in caches.windows.items()}
        self._groups = {source: _words(ring.flatten(2)) for source, ring in caches.groups.items()}
        self._entries = {source: _words(pool) for source, pool in caches.global_kv.items()}
        self._keys = {source: _words(pool) for source, pool in caches.index_keys.items()}
        draw = np.random.Generator(np.random.PCG64(3))
        self._table = draw.normal(0, 2, (TABLE_ROWS, config.vocab_size)).astype(np.float32)
        self.rows = 0
        """Computed so far."""

    def run(self, rows: Sequence[LaunchedRows]) -> list[NDArray[np.float32] | None]:
        return [self._logits(row) for row in rows]

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        raise NotImplementedError("it does not draft")

    def _logits(self, row: LaunchedRows) -> NDArray[np.float32] | None:
        segment, scores = row.segment, row.sequence.prompt_scores
        self.rows += len(segment.token_ids)
        state, start = self._embedded(segment), segment.start
        sums: dict[int, Hashes] = {}
        for layer in range(len(self._windows)):
            above = layer > self._config.last_kv_source
            sees_from = max(segment.window_start, segment.floor if above else 0)
            window = self._windowed(layer, state, start, segment, sees_from)
            source = self._config.kv_source(layer)
            if source is not None and source == layer:
                self._write_entries(source, state, segment)
                sums[source] = self._entry_sums(source, segment)
            if layer == self._config.last_kv_source and segment.floor > start:
                skipped = min(segment.floor, segment.end) - start
                state, window, start = state[skipped:], window[skipped:], start + skipped
            if not len(state):
                return None
            ends = (np.arange(start, segment.end) + 1) // max(1, self._config.ratio(layer))
            seen = sums[source][ends] if source is not None else np.zeros(len(state), np.uint64)
            state = _mixed(state + window * np.uint64(3) + seen * np.uint64(5) + SALTS[layer])
        if scores is not None:
            wanted = scores.wanted(segment.start, segment.end)
            scores.take(self._table[state[wanted.start - start : wanted.stop - start] % np.uint64(TABLE_ROWS)])
        if segment.logits_start is None:
            return None
        return self._table[state[max(0, segment.logits_start - start) :] % np.uint64(TABLE_ROWS)]

    def _embedded(self, segment: Segment) -> Hashes:
        """[rows]: a row's token and those before it that the n-gram looks back at."""
        back = self._config.engram_max_ngram_size - 1
        known = np.array([*segment.history, *segment.token_ids], np.uint64)[-len(segment.token_ids) - back :]
        known = np.concatenate((np.zeros(len(segment.token_ids) + back - len(known), np.uint64), known + np.uint64(1)))
        state = np.arange(segment.start, segment.end, dtype=np.uint64)
        for age in range(back + 1):
            state = _mixed(state + known[back - age : len(known) - age])
        return state

    def _windowed(self, layer: int, state: Hashes, start: int, segment: Segment, sees_from: int) -> Hashes:
        """[rows] sum over the window rows that each sees; leaves theirs in the ring."""
        ring = self._windows[layer][segment.slot, :, 0]
        first = max(sees_from, start - self._config.window + 1)
        before = ring[np.arange(min(first, start), start) % len(ring)]
        own = _mixed(state + SALTS[WINDOW + layer])
        kept = np.arange(max(start, segment.end - len(ring)), segment.end)
        ring[kept % len(ring)] = own[kept - start]
        first = start - len(before)
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(np.concatenate((before, own)), dtype=np.uint64)))
        positions = np.arange(start, segment.end)
        low = np.maximum(np.maximum(positions - self._config.window + 1, sees_from), first)
        return sums[positions + 1 - first] - sums[low - first]

    def _write_entries(self, source: int, state: Hashes, segment: Segment) -> None:
        """Entries whose last token is among the rows, and the raw rows of those that are unfinished."""
        ratio = self._config.ratio(source)
        raw = _mixed(state + SALTS[RAW + source])
        first = max(segment.start // ratio, segment.write_start // ratio)
        numbers = np.arange(first, max(first, segment.end // ratio))
        if ratio > 1:
            ring = self._groups[source][segment.slot, :, 0]
            back = min(segment.start, ratio - 1)
            pool = np.concatenate((ring[np.arange(segment.start - back, segment.start) % len(ring)], raw))
            kept = np.arange(max(segment.start, segment.end - len(ring)), segment.end)
            ring[kept % len(ring)] = raw[kept - segment.start]
            members = numbers[:, None] * ratio + np.arange(ratio) - segment.start + back
            # The order of a group's rows tells.
            raw = (pool[members] * np.arange(1, ratio + 1, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
        else:
            raw = raw[numbers - segment.start]
        blocks, places = self._places(numbers, ratio, segment)
        self._entries[source][blocks, places, 0] = _mixed(raw)
        self._keys[source][blocks, places, 0] = _mixed(raw + SALTS[KEY])

    def _entry_sums(self, source: int, segment: Segment) -> Hashes:
        """[1 + entries] running sums, read back from the blocks."""
        ratio = self._config.ratio(source)
        numbers = np.arange(segment.end // ratio)
        blocks, places = self._places(numbers, ratio, segment)
        seen = self._entries[source][blocks, places, 0] + _mixed(self._keys[source][blocks, places, 0])
        return np.concatenate((np.zeros(1, np.uint64), np.cumsum(_mixed(seen + numbers.astype(np.uint64)), dtype="u8")))

    def _places(
        self, numbers: NDArray[np.int64], ratio: int, segment: Segment
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        per_block = self._caches.block_tokens // ratio
        return np.array(segment.block_table, np.int64)[numbers // per_block], numbers % per_block


def _words(records: Tensor) -> Hashes:
    """[…, rows, words] view of records, whose first word is used."""
    flat = records.view(torch.uint8).numpy()
    return flat[..., : flat.shape[-1] // 8 * 8].view(np.uint64)


def _mixed(words: Hashes) -> Hashes:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
