"""The text network: rows of several sequences in, logits out.

Segment… ─▶ BatchPlan ─▶ ForwardPass ─▶ layer 0 … layer N-1 ─▶ collapse, norm, head ─▶ logits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.linear import linear
from whalepod.kernels.mhc import collapse
from whalepod.kernels.numerics import batch_rows, wide_dtype
from whalepod.kernels.quantise import PackedFormat
from whalepod.kernels.rms_norm import rms_norm

from .batch import ImageRows, Segment
from .batch_plan import BatchPlan
from .caches import Caches
from .checkpoint import EngramTable, load_engram_tables, load_tensors
from .config import ModelConfig
from .context_parallel import RowExchange, SharedRows, plan_shared
from .draft import Drafter
from .engram import compress, hash_rows, look_back
from .engram_ahead import EngramAhead
from .engram_reads import EngramReads
from .engram_token_map import engram_token_map
from .forward_pass import ForwardPass, Recorder
from .layer import Layer
from .projection import Weights
from .record_formats import RELEASE_FORMATS
from .rotary import rotary_frequencies
from .routed_experts import LocalExperts, MakeExperts
from .rows import pad
from .tensor_layout import ModelRole, TensorSpec
from .tokenizer import Tokenizer


class Network:
    """The layers of a role. Holds weights only: every forward brings its caches.

    A row's results have the same bits alone and in any batch, order and chunking (CPU reference kernels).
    Role `encoder` stops after the last KV source has written its rows, and returns no logits.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        engram_tables: Mapping[int, EngramTable],
        token_map: Tensor | None,
        role: ModelRole = ModelRole.FULL,
        input_format: PackedFormat | None = None,
        make_experts: MakeExperts = LocalExperts.from_weights,
        packed: bool | None = None,
    ) -> None:
        """`tensors` by released name, all floats; the dtype of `embed.weight` is the one the network works in.

        `make_experts` builds each layer's routed experts; the default needs the weights of all of them.
        `token_map` [vocab] gives compressed ids to the n-gram layers; None if there are none. `input_format` is what
        inputs of quantised matrices are rounded to (release arithmetic). `packed`: whether caches in the release's
        formats are read where they lie (`packed_attention.py`) and not gathered; None: in bfloat16 on a GPU.
        """
        weights = Weights(tensors, input_format=input_format)
        self.config = config
        self.role = role
        self.embed = weights["embed.weight"]
        self.packed = self.embed.is_cuda and self.dtype == torch.bfloat16 if packed is None else packed
        self.holds_experts = make_experts == LocalExperts.from_weights
        full = role is ModelRole.FULL
        self.norm = weights["norm.weight"] if full else None
        self.head = weights["head.weight"] if full else None
        dtype = wide_dtype(self.embed.dtype)
        plain = next((layer for layer, ratio in enumerate(config.compress_ratios) if ratio == 0), None)
        self._frequencies = {
            True: rotary_frequencies(config.rope(config.last_kv_source), dtype).to(self.device),
            False: rotary_frequencies(config.rope(config.last_kv_source if plain is None else plain), dtype).to(
                self.device
            ),
        }
        count = config.num_hidden_layers if full else config.last_kv_source + 1
        self.layers = [
            Layer.from_weights(
                weights.below(f"layers.{layer}."),
                config,
                layer,
                producers_only=not full and layer == config.last_kv_source,
                make_experts=make_experts,
            )
            for layer in range(count)
        ]
        assert not config.engram_layer_ids or token_map is not None, "n-gram layers need a token map"
        drafts = full and config.num_nextn_predict_layers > 0
        self.drafter = (
            Drafter.from_weights(weights, config, self._frequencies[False], make_experts=make_experts)
            if drafts
            else None
        )
        self._engram_tables = engram_tables
        self.engram_reads = EngramReads()
        self._engram_ahead = EngramAhead(engram_tables, self.engram_reads)
        self._token_map = token_map

    @classmethod
    def load(
        cls,
        directory: Path | str,
        *,
        role: ModelRole = ModelRole.FULL,
        dtype: torch.dtype = torch.float32,
        input_format: PackedFormat | None = None,
        make_experts: MakeExperts = LocalExperts.from_weights,
        wanted: Callable[[TensorSpec], bool] | None = None,
        device: torch.device | str = "cpu",
        packed: bool | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """From a checkpoint directory. Reads the tensors of `role` that are `wanted`, all of them by default:
        `make_experts` must do with those. Raises ConfigError or CheckpointError."""
        config = ModelConfig.from_dir(directory)
        token_map = engram_token_map(Tokenizer.from_dir(directory), config) if config.engram_layer_ids else None
        return cls(
            config,
            load_tensors(directory, config, role=role, dtype=dtype, wanted=wanted, device=device, progress=progress),
            engram_tables=load_engram_tables(directory, config, role=role, dtype=dtype),
            token_map=token_map,
            role=role,
            input_format=input_format,
            make_experts=make_experts,
            packed=packed,
        )

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment], caches: Caches, *, recorder: Recorder | None = None) -> Tensor:
        """Compute all rows of `segments`, at most one of each sequence, and leave theirs in `caches`.

        Returns the `logits` of the rows that asked for them, in the order of the segments.
        """
        return self.logits(self.compute(segments, caches, recorder=recorder))

    @torch.inference_mode()
    def compute(self, segments: Sequence[Segment], caches: Caches, *, recorder: Recorder | None = None) -> ForwardPass:
        """`forward` up to its logits: the rows as they left the last layer."""
        return self.run(self.begin(segments, caches, recorder=recorder))

    @torch.inference_mode()
    def run(self, run: ForwardPass) -> ForwardPass:
        """Every layer of a forward that has begun."""
        for layer in self.layers:
            layer(run)
            if run.rows.count == 0:  # Every row lies below its floor.
                break
        else:
            run.reunite()
            if self.drafter is not None:
                self.drafter.remember(run)
        return run

    @torch.inference_mode()
    def compute_shared(self, segment: Segment, caches: Caches, exchange: RowExchange) -> ForwardPass:
        """`compute` of one segment that the ranks of `exchange` divide: each calls this, with the same segment but for
        slot and blocks, over caches that hold the same. Results and caches have the bits of `compute` on every rank."""
        shared = SharedRows.divide(segment, exchange)
        if shared is None:
            return self.compute([segment], caches)
        assert not self.packed, "packed kernels compute alone"
        assert not segment.images, "rows of images are not divided over ranks"
        own = shared.own_segments(segment, self.config.engram_max_ngram_size - 1)
        plan = plan_shared(segment, shared, self.config, caches)
        text = self._text_rows(own)
        if text is None and self._text_rows([segment]) is not None:  # Ranks must agree on whether it is there.
            text = torch.ones(len(plan.token_ids), dtype=torch.bool)
        run = self.begin_planned(plan, caches, text=text, memories=self.memories(own))
        run.shared = shared
        return self.run(run)

    @torch.inference_mode()
    def begin(self, segments: Sequence[Segment], caches: Caches, *, recorder: Recorder | None = None) -> ForwardPass:
        """The state in front of layer 0: embeddings in every stream, of which the first is looked at."""
        packed = self.packed and caches.formats == RELEASE_FORMATS
        plan = BatchPlan.build(segments, self.config, caches, packed=packed)
        return self.begin_planned(
            plan,
            caches,
            text=self._text_rows(segments),
            memories=self.memories(segments),
            images=_image_rows(segments),
            recorder=recorder,
        )

    @torch.inference_mode()
    def begin_planned(
        self,
        plan: BatchPlan,
        caches: Caches,
        *,
        text: Tensor | None,
        memories: Mapping[int, Tensor],
        images: Sequence[ImageRows] = (),
        recorder: Recorder | None = None,
    ) -> ForwardPass:
        """As `begin`, for a plan that is made: nothing in it waits for the device. `images`: by their place among all
        rows."""
        embedded = self.embed[plan.token_ids]
        for place, rows in images:
            embedded[place : place + len(rows)] = rows.to(embedded)
        if images:
            embedded[plan.every.count :] = embedded[plan.every.count - 1]  # padding is the last row again
        pre = torch.zeros(len(embedded), self.config.hc_mult, dtype=wide_dtype(self.dtype), device=self.device)
        pre[:, 0] = 1
        run = ForwardPass(
            config=self.config,
            caches=caches,
            plan=plan,
            frequencies=self._frequencies,
            streams=embedded[:, None, :].repeat(1, self.config.hc_mult, 1),
            pre=pre,
            rows=plan.every,
            text=text,
            memories=memories,
            recorder=recorder,
        )
        run.record("embed", embedded)
        return run

    @torch.inference_mode()
    def logits(self, run: ForwardPass, *, rows: Tensor | None = None) -> Tensor:
        """Logits [rows, vocab_size] float32 (float64 for float64 networks) after the last layer, of the kept rows that
        asked for them, or of these kept rows."""
        dtype = wide_dtype(self.dtype)
        rows = run.plan.logit_rows if rows is None else rows
        if self.head is None or self.norm is None or not len(rows):
            return torch.empty(0, self.config.vocab_size, dtype=dtype, device=self.device)
        hidden = rms_norm(collapse(run.streams[rows], run.pre[rows]), self.norm, eps=self.config.rms_norm_eps)
        return linear(hidden, self.head, out_dtype=dtype)

    def _text_rows(self, segments: Sequence[Segment]) -> Tensor | None:
        image = self.config.image_token_id
        if image is None or not any(image in segment.token_ids for segment in segments):
            return None
        text = pad(np.array([token != image for segment in segments for token in segment.token_ids]))
        return torch.from_numpy(text).to(self.device)

    def memories(self, segments: Sequence[Segment], *, padded: int | None = None) -> dict[int, Tensor]:
        """What each n-gram layer remembers about the rows, on the device: depends on token ids only.

        `padded`: rows with padding; None: whole tiles.
        """
        tokens = self.config.engram_max_ngram_size
        ids = torch.cat([look_back(s.token_ids, s.history, tokens=tokens) for s in segments])
        missing = (batch_rows(len(ids)) if padded is None else padded) - len(ids)
        hashed = self._table_rows(torch.cat((ids, ids[-1:].expand(missing, -1))))
        if not hashed:
            return {}
        self._engram_ahead.bring(hashed)
        with self.engram_reads.reading(sum(rows.numel() for rows in hashed.values())):
            read = {layer: self._engram_tables[layer].rows(rows).flatten(1) for layer, rows in hashed.items()}
        return {layer: rows.to(self.device, non_blocking=True) for layer, rows in read.items()}

    def expect(self, token_ids: Sequence[int], history: Sequence[int]) -> None:
        """A later step will have rows of these tokens, behind `history`: its n-gram rows may be brought into memory.
        For any thread; never waits."""
        ids = look_back(token_ids, history, tokens=self.config.engram_max_ngram_size)
        if self._engram_tables and len(ids):
            self._engram_ahead.expect(lambda: self._table_rows(ids))

    def _table_rows(self, ids: Tensor) -> dict[int, Tensor]:
        """ids [rows, n-gram tokens] as `look_back` gives them -> [rows, columns] of each n-gram layer's table."""
        config, layouts = self.config, dict(zip(self.config.engram_layer_ids, self.config.engram, strict=True))
        layers = [layer.number for layer in self.layers if layer.engram is not None]
        if not layers or self._token_map is None:
            return {}
        compressed = compress(ids, self._token_map, image_token_id=config.image_token_id)
        pad_id = int(self._token_map[config.engram_pad_token_id])
        return {layer: hash_rows(compressed, layouts[layer], pad_id=pad_id) for layer in layers}


def _image_rows(segments: Sequence[Segment]) -> list[ImageRows]:
    """Those of all segments, by their place among all rows."""
    found: list[ImageRows] = []
    before = 0
    for segment in segments:
        found += [ImageRows(before + image.offset, image.rows) for image in segment.images]
        before += len(segment.token_ids)
    return found
