"""Attention over packed records where they lie: what `attention.py`, `global_kv.py` and `indexer.py` do by gathering
and decoding, done by kernels that read and write the caches' bytes.

Takes release formats only. Nothing here waits for the device or depends on the values there, so a graph can hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whalepod.kernels.attention_rows import EntryRows, LatentRows, WindowRows, write_attention_rows
from whalepod.kernels.candidates import candidate_blocks, candidate_scores, entry_places
from whalepod.kernels.index_queries import index_queries
from whalepod.kernels.numerics import tiled
from whalepod.kernels.packed_index_scores import packed_index_scores
from whalepod.kernels.sparse_attention import sparse_attention
from whalepod.kernels.top_entries import top_entries

from .forward_pass import ForwardPass, PackedSelection
from .packed_plan import PackedPlan, PackedWindow
from .rotary import RotaryAngles

if TYPE_CHECKING:
    from .attention import Attention, RowWriter
    from .global_kv import GlobalKvWriter
    from .indexer import Indexer


def write_rows(
    writer: RowWriter, x: Tensor, run: ForwardPass, attention: Attention | None
) -> tuple[Tensor, Tensor | None]:
    """x [rows, D] the normalised input -> the pool [.., record_bytes] that holds the window of its rows; and of
    `attention`, if it looks from these same rows, the query latents, which follow a product of the same input."""
    window, angles = packed_window(run, writer.layer), run.rotary(compressed=writer.compressed)
    entries = None if writer.global_kv is None else _entries(writer.global_kv, x, run)
    if attention is None or writer.joined is None:
        latents = None if attention is None else attention.query_down(x)
        rows = writer.kv(x)
    else:
        latents, rows = writer.joined(x).split([attention.query_down.weight.shape[0], writer.kv.weight.shape[0]], dim=1)
    return put_records(
        rows,
        writer.kv_norm,
        angles,
        window,
        run.caches.windows[writer.layer],
        latents=None if attention is None or latents is None else _latent_rows(attention, latents),
        entries=entries,
        eps=writer.eps,
    )


def put_records(
    rows: Tensor,
    norm: Tensor,
    angles: RotaryAngles,
    window: PackedWindow,
    ring: Tensor,
    *,
    latents: LatentRows | None = None,
    entries: EntryRows | None = None,
    eps: float,
) -> tuple[Tensor, Tensor | None]:
    """Normalise, turn and pack rows [rows, head_dim] into the ring [slots, ring_rows, record_bytes], and into the pool
    that their queries look at, which this returns. With it comes what else `write_attention_rows` does."""
    ring, scratch = ring.flatten(0, 1), window.scratch
    pool = ring
    if scratch is not None:
        pool = ring.new_empty(scratch.rows, ring.shape[1])
        pool[scratch.previous_places] = ring[scratch.previous]
    window_rows = WindowRows(rows, norm, angles.cos, angles.sin, window.writes, pool)
    latent = write_attention_rows(latents=latents, window=window_rows, entries=entries, eps=eps)
    if scratch is not None:
        ring[scratch.kept_slots] = pool[scratch.kept_places]
    return pool, latent


def query_latents(attention: Attention, x: Tensor) -> Tensor:
    """x [rows, D] the normalised input -> [rows, q_lora_rank], rounded as the matrices behind take it."""
    latents = write_attention_rows(latents=_latent_rows(attention, attention.query_down(x)), eps=attention.eps)
    assert latents is not None
    return latents


def _latent_rows(attention: Attention, rows: Tensor) -> LatentRows:
    return LatentRows(rows, attention.query_norm, attention.query_up.input_format)


def _entries(writer: GlobalKvWriter, x: Tensor, run: ForwardPass) -> EntryRows:
    """x [rows, D], the normalised input of a KV source."""
    plan, caches = packed_plan(run).entries[writer.ratio], run.caches
    angles = _entry_angles(run, writer.ratio)
    return EntryRows(
        raw=writer.compressor(x, out_dtype=torch.float32),
        ring=None if plan.members is None else caches.groups[writer.layer].flatten(0, 1).flatten(1),
        members=plan.members,
        keeps=plan.keeps,
        norm=writer.norm,
        key_weight=writer.index_key.weight,
        key_norm=writer.index_key_norm,
        cos=angles.cos,
        sin=angles.sin,
        destinations=plan.destinations,
        entries=caches.global_kv[writer.layer].flatten(0, 1),
        keys=caches.index_keys[writer.layer].flatten(0, 1),
    )


def _entry_angles(run: ForwardPass, ratio: int) -> RotaryAngles:
    """Of the first positions of the rows' groups; all sources of a ratio ask for the same."""
    if ratio == 1:
        return run.rotary(compressed=True)
    if ratio not in run.entry_angles:
        positions = packed_plan(run).entries[ratio].positions
        run.entry_angles[ratio] = RotaryAngles.at(positions, run.frequencies[True])
    return run.entry_angles[ratio]


def select(indexer: Indexer, x: Tensor, latent: Tensor, run: ForwardPass) -> PackedSelection:
    """x [rows, D] the layer's normalised input, latent [rows, q_lora_rank] of `write_rows` or `query_latents`."""
    config, plan = indexer.config, packed_plan(run)
    ratio = config.ratio(indexer.source)
    rows = plan.every if run.rows is run.plan.every else plan.kept
    visible, entries = rows.visible[ratio], rows.entries_max[ratio]
    per_block = run.caches.block_tokens // ratio
    block, top_blocks = config.candidate_block_size, config.candidate_topk_blocks
    blocks = run.candidate_blocks if indexer.layer > config.candidate_source_layer_id else None
    if entries <= min(config.index_topk, top_blocks * block):
        number = torch.arange(config.index_topk, dtype=torch.int32, device=x.device)
        chosen = torch.where(number < visible[:, None], number, -1)
        blocks = None
    else:
        arguments = (*_queries(indexer, x, latent, run), _keys(indexer, run), plan.tables, rows.segments, visible)
        if blocks is None:
            scores = packed_index_scores(
                *arguments,
                rows.groups,
                entries_per_block=per_block,
                group_rows=rows.group_rows,
                entries_max=entries,
            )
            if indexer.layer == config.candidate_source_layer_id and entries > top_blocks * block:
                run.candidate_blocks = candidate_blocks(scores, visible, block=block, top_blocks=top_blocks)
        else:
            scores, visible = candidate_scores(*arguments, blocks, block=block, entries_per_block=per_block)
        chosen = top_entries(scores, visible, count=config.index_topk)
    chosen, places = entry_places(chosen, plan.tables, rows.segments, blocks, block=block, entries_per_block=per_block)
    run.record(f"layer{indexer.layer}.index_rows", chosen)
    return PackedSelection(places)


def _queries(indexer: Indexer, x: Tensor, latent: Tensor, run: ForwardPass) -> tuple[Tensor, Tensor]:
    """Queries [rows, heads, width] after their round trip, and the heads' weights [rows, heads] float32."""
    heads, width = indexer.config.index_n_heads, indexer.config.index_head_dim
    angles = run.rotary(compressed=True)
    queries = index_queries(indexer.queries.of_prepared(latent).unflatten(1, (heads, width)), angles.cos, angles.sin)
    return queries, indexer.head_weights(x, out_dtype=torch.float32) * (width**-0.5 * heads**-0.5)


def _keys(indexer: Indexer, run: ForwardPass) -> Tensor:
    return run.caches.index_keys[indexer.source].flatten(0, 1)


def look(attention: Attention, latent: Tensor, pool: Tensor, run: ForwardPass) -> Tensor:
    """latent [rows, q_lora_rank] as in `select`, `pool` of `write_rows` -> what the heads saw [rows, heads, head_dim],
    turned back."""
    window, angles = packed_window(run, attention.layer), run.rotary(compressed=attention.compressed)
    queries = attention.query_up.of_prepared(latent).unflatten(1, (attention.heads, -1))
    source = run.config.kv_source(attention.layer)
    chosen = run.selection.places if source is not None and isinstance(run.selection, PackedSelection) else None
    return sparse_attention(
        queries,
        pool,
        window.bases,
        window.positions,
        window.lowest,
        attention.sink,
        angles.cos,
        angles.sin,
        ring=window.ring,
        window_rows=run.config.window,
        scale=queries.shape[2] ** -0.5,
        entries=None if source is None else run.caches.global_kv[source].flatten(0, 1),
        chosen=chosen,
        batch_invariant=tiled(),
    )


def packed_plan(run: ForwardPass) -> PackedPlan:
    assert run.plan.packed is not None
    return run.plan.packed


def packed_window(run: ForwardPass, layer: int) -> PackedWindow:
    plan, source = packed_plan(run), run.config.last_kv_source
    if layer == source:
        return plan.source_window
    return plan.lower_window if layer < source else plan.upper_window
