"""Bugs that someone could write into the model, each as one change of its source."""

from __future__ import annotations

from tests.mutants.planted_bug import PlantedBug
from tests.mutants.planted_operator_bugs import OPERATOR_BUGS

READ_RING = (
    "    pool = torch.cat((records.new_zeros(1, records.shape[1]), ring.index_select(0, plan.previous), records))\n"
)
WRITE_RING = "    ring[plan.write_slots] = records.index_select(0, plan.write_rows)\n"

BUGS = (
    # Windows.
    PlantedBug(
        "window one row short", "model/batch_plan.py", '"window": config.window,', '"window": config.window - 1,'
    ),
    PlantedBug(
        "window one row long", "model/batch_plan.py", '"window": config.window,', '"window": config.window + 1,'
    ),
    PlantedBug(
        "windows read below the start of a replay",
        "model/batch_plan.py",
        "lower = WindowPlan.build(every, every, window_starts, slots, **sizes)",
        "lower = WindowPlan.build(every, every, window_starts * 0, slots, **sizes)",
    ),
    PlantedBug(
        "rows are read from the ring after they were overwritten",
        "model/attention.py",
        READ_RING + WRITE_RING,
        WRITE_RING + READ_RING,
    ),
    # Kept rows.
    PlantedBug(
        "floor one row late",
        "model/batch_plan.py",
        "np.clip(floors, starts, ends)",
        "np.clip(floors + 1, starts, ends)",
    ),
    PlantedBug(
        "layers above the last source see below the floor",
        "model/batch_plan.py",
        "WindowPlan.build(kept, kept, np.maximum(floors, window_starts), slots, **sizes)",
        "WindowPlan.build(kept, kept, window_starts, slots, **sizes)",
    ),
    PlantedBug(
        "the last source's window is cut at the floor",
        "model/batch_plan.py",
        "WindowPlan.build(kept, every, window_starts, slots, **sizes)",
        "WindowPlan.build(kept, every, np.maximum(floors, window_starts), slots, **sizes)",
    ),
    # Global KV.
    PlantedBug(
        "replayed rows write entries",
        "model/batch_plan.py",
        "first = np.maximum(rows.starts // ratio, write_starts // ratio)",
        "first = rows.starts // ratio",
    ),
    PlantedBug(
        "an entry is rotated at its last token",
        "model/batch_plan.py",
        "positions=_tensor(numbers * ratio),",
        "positions=_tensor(numbers * ratio + ratio - 1),",
    ),
    PlantedBug(
        "entries go to blocks in order, not through the table",
        "model/batch_plan.py",
        "pool_rows(tables[segments, numbers // per_block], numbers, per_block)",
        "pool_rows(numbers // per_block, numbers, per_block)",
    ),
    PlantedBug(
        "lost pair state",
        "model/global_kv.py",
        "        ring[plan.write_slots] = own[plan.write_rows].to(ring.dtype)\n",
        "",
    ),
    PlantedBug(
        "index keys from the rotated latent",
        "model/global_kv.py",
        "rms_norm(self.index_key(latent),",
        "rms_norm(self.index_key(angles.rotate(latent)),",
    ),
    PlantedBug(
        "index keys are not rotated",
        "model/global_kv.py",
        "index_key.encode(angles.rotate(keys))",
        "index_key.encode(keys)",
    ),
    PlantedBug(
        "one softmax for all channels of a group",
        "kernels/compressor/reference.py",
        "torch.exp(scores - scores.amax(dim=1, keepdim=True))",
        "torch.exp((scores - scores.amax(dim=1, keepdim=True)).mean(dim=2, keepdim=True).expand_as(scores))",
    ),
    # Indexer.
    PlantedBug(
        "stale index keys of another source",
        "model/indexer.py",
        "pool = run.caches.index_keys[self.source]",
        "pool = run.caches.index_keys[2 if self.source == 4 else self.source]",
    ),
    PlantedBug(
        "an unfinished group is visible",
        "model/indexer.py",
        "(run.rows.positions + 1) // config.ratio(self.source)",
        "run.rows.positions // config.ratio(self.source) + 1",
    ),
    PlantedBug("candidates are ignored", "model/indexer.py", "allowed = allowed & run.candidates", "allowed = allowed"),
    PlantedBug(
        "candidate block off by one",
        "kernels/indexer/reference.py",
        "(visible[:, None] - 1) // block",
        "visible[:, None] // block",
    ),
    PlantedBug(
        "negative head scores count", "kernels/indexer/reference.py", "by_head.clamp_(min=0).mul_", "by_head.mul_"
    ),
    PlantedBug(
        "the best entries but one",
        "kernels/indexer/reference.py",
        "    above = values > last\n",
        "    above = values > values.amax(dim=1, keepdim=True)\n",
    ),
    # Residual streams.
    PlantedBug(
        "transposed mixing matrix",
        "kernels/mhc/reference.py",
        "mixes.comb.unsqueeze(3)",
        "mixes.comb.transpose(1, 2).unsqueeze(3)",
    ),
    PlantedBug(
        "one normalisation round short",
        "kernels/mhc/reference.py",
        "for iteration in range(iterations):",
        "for iteration in range(iterations - 1):",
    ),
    PlantedBug(
        "own instead of lagged mix",
        "model/layer.py",
        "collapse(state.streams, state.pre), self.feed_forward_norm",
        "collapse(state.streams, self.feed_forward_mixer(state.streams).pre), self.feed_forward_norm",
    ),
    PlantedBug(
        "the head sees the mean of the streams",
        "model/network.py",
        "collapse(run.streams[rows], run.pre[rows])",
        "run.streams[rows].mean(dim=1)",
    ),
    # Attention.
    PlantedBug("missing sink", "kernels/attention/reference.py", " + torch.exp(sink - highest)", ""),
    PlantedBug(
        "the output stays rotated",
        "model/attention.py",
        "self._project(angles.rotate_back(self._look(queries, window, selection)))",
        "self._project(self._look(queries, window, selection))",
    ),
    PlantedBug(
        "wrong rotary base for ratio 1",
        "model/attention.py",
        "            compressed=config.ratio(layer) > 0,\n            kv=",
        "            compressed=config.ratio(layer) > 1,\n            kv=",
    ),
    PlantedBug(
        "slow pairs are not stretched", "model/rotary.py", "if parameters.factor == 1.0:", "if parameters.factor > 0:"
    ),
    PlantedBug(
        "half-split instead of interleaved rotation",
        "kernels/rope/reference.py",
        "swapped = wide.unflatten(-1, (-1, 2)).flip(-1).view(wide.shape)",
        "swapped = wide.unflatten(-1, (2, -1)).flip(-2).reshape(wide.shape)",
    ),
    # N-gram memory.
    PlantedBug(
        "n-gram rows of the wrong order",
        "model/engram.py",
        "torch.stack(hashes, dim=1)",
        "torch.stack(hashes[::-1], dim=1)",
    ),
    PlantedBug(
        "n-grams end at the border of a chunk",
        "model/engram.py",
        "before = list(history[-(tokens - 1) :]) if tokens > 1 else []",
        "before = list[int]()",
    ),
    PlantedBug(
        "n-grams reach across dead tokens",
        "model/engram.py",
        "(compressed == DEAD).cumsum(dim=1) > 0",
        "compressed == DEAD",
    ),
    PlantedBug(
        "gate without a sign", "kernels/engram_gate/reference.py", "torch.where(dots < 0, -roots, roots)", "roots"
    ),
    PlantedBug(
        "images remember n-grams",
        "kernels/engram_gate/reference.py",
        "gates = gates * text[:, None]",
        "gates = gates * 1",
    ),
    # Experts.
    PlantedBug(
        "bias used as weight",
        "kernels/router/reference.py",
        "weights = scores.gather(1, ids)",
        "weights = (scores + bias).gather(1, ids)",
    ),
    PlantedBug("weights are not normalised", "kernels/router/reference.py", "if chosen > 1:", "if chosen > 1000:"),
    PlantedBug(
        "images are routed as text",
        "model/feed_forward.py",
        "self.bias if text is None else torch.where(text[:, None], self.bias, self.image_bias)",
        "self.bias",
    ),
    # Images.
    PlantedBug(
        "a cell's places before its channels",
        "model/vision/aligner.py",
        "split.permute(0, 2, 4, 1, 3)",
        "split.permute(0, 2, 1, 3, 4)",
    ),
    PlantedBug(
        "patches turn with neighbouring channels",
        "model/vision/tower.py",
        "first, second = wide.chunk(2, dim=-1)",
        "first, second = wide[..., 0::2], wide[..., 1::2]",
    ),
    PlantedBug(
        "rows and columns of patches are swapped",
        "model/vision/tower.py",
        "torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=1)",
        "torch.cat((column[:, None] * frequencies, row[:, None] * frequencies), dim=1)",
    ),
    PlantedBug(
        "lines of an image without their end",
        "model/vision/encoder.py",
        "self._newline.expand(grid.rows, 1, -1)",
        "embeddings.view(grid.rows, grid.columns, -1)[:, -1:]",
    ),
    PlantedBug(
        "an image's rows one too early",
        "model/batch.py",
        "ImageRows(low - start, rows[low - first : high - first])",
        "ImageRows(max(0, low - start - 1), rows[low - first : high - first])",
    ),
    PlantedBug(
        "the aligner's nearly GELU",
        "model/vision/aligner.py",
        "functional.gelu(self.inner(torch.cat(cells)))",
        'functional.gelu(self.inner(torch.cat(cells)), approximate="tanh")',
    ),
    PlantedBug(
        "the gate is clamped on both sides",
        "kernels/activation/reference.py",
        "gate.clamp(max=limit)",
        "gate.clamp(-limit, limit)",
    ),
    # Formats.
    PlantedBug(
        "nibbles swapped when packed",
        "kernels/quantise/reference.py",
        "codes[..., 0::2] | codes[..., 1::2] << 4",
        "codes[..., 1::2] | codes[..., 0::2] << 4",
    ),
    PlantedBug(
        "scales of exact powers are doubled", "kernels/quantise/reference.py", "+ 0x7FFFFF >> 23", "+ 0x800000 >> 23"
    ),
    PlantedBug("ties round up", "kernels/quantise/reference.py", "torch.where(odd, below, middles)", "below"),
    PlantedBug(
        "index queries are not quantised",
        "model/indexer.py",
        "        queries = run.caches.formats.index_key.round_trip(queries)\n",
        "",
    ),
    # Drafter.
    PlantedBug(
        "drafts one position early",
        "model/draft.py",
        "Rows.between(positions, positions + block)",
        "Rows.between(positions - 1, positions - 1 + block)",
    ),
    PlantedBug(
        "the block looks causally",
        "model/draft.py",
        "index=torch.from_numpy(seen[rows.segments]),",
        "index=torch.from_numpy(np.where(np.arange(window + block) - window > "
        "(np.arange(len(rows.segments)) % block)[:, None], 0, seen[rows.segments])),",
    ),
    PlantedBug(
        "draft window one row short",
        "model/draft.py",
        "np.where(context >= lows[:, None], places, 0)",
        "np.where(context > np.maximum(lows, positions - window)[:, None], places, 0)",
    ),
    PlantedBug(
        "taps one layer early",
        "model/layer.py",
        "if self.number in run.config.dspark_target_layer_ids:",
        "if self.number + 1 in run.config.dspark_target_layer_ids:",
    ),
    PlantedBug(
        "confidence of the normalised hidden state",
        "model/draft.py",
        "for rows in (base, hidden))",
        "for rows in (base, normed))",
    ),
    PlantedBug(
        "every draft knows the anchor only",
        "model/draft.py",
        "            ids.append(previous)\n",
        "            ids.append(previous)\n"
        "            previous = torch.tensor([anchor.token_id for anchor in anchors])\n",
    ),
    # Bits.
    PlantedBug(
        "softmax is shifted by the largest score of the batch",
        "kernels/attention/reference.py",
        "torch.maximum(scores.amax(dim=-1, keepdim=True), sink)",
        "torch.maximum(scores.amax(), sink)",
    ),
    *OPERATOR_BUGS,
)
