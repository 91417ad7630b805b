"""The network of `spec/model.md` written down a second time: whole prompts, float64, one row after the other.

No caches, no kernels, no batches, and nothing shared with the product but configuration and weight names. Slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from whalepod.model.config import ModelConfig

Mix = tuple[Tensor, Tensor, Tensor]


@dataclass
class PlainNetwork:
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    token_map: Tensor
    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    selected: list[list[int]] = field(default_factory=list)
    candidates: list[set[int]] = field(default_factory=list)

    def weight(self, name: str) -> Tensor:
        return self.tensors[name].double()

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[tokens, vocab] float64: all rows through all layers."""
        config = self.config
        streams = self.weight("embed.weight")[list(ids)][:, None].repeat(1, config.hc_mult, 1)
        pre = functional.one_hot(torch.zeros(len(ids), dtype=torch.int64), config.hc_mult).double()
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}."
            if layer in config.engram_layer_ids:
                streams = self.with_memory(layer, streams, ids)
            mix = self.mix(f"{name}hc_attn_", streams)
            x = self.norm(torch.einsum("ts,tsd->td", pre, streams), f"{name}attn_norm")
            streams = expand(self.attention(layer, x), streams, mix)
            pre, mix = mix[0], self.mix(f"{name}hc_ffn_", streams)
            x = self.norm(torch.einsum("ts,tsd->td", pre, streams), f"{name}ffn_norm")
            streams = expand(self.experts(f"{name}ffn.", x, ids), streams, mix)
            pre = mix[0]
        return self.norm(torch.einsum("ts,tsd->td", pre, streams), "norm") @ self.weight("head.weight").T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weight(f"{name}.weight")

    def mix(self, name: str, streams: Tensor) -> Mix:
        config, count = self.config, self.config.hc_mult
        flat = streams.flatten(1)
        values = flat @ self.weight(f"{name}fn").T / (flat.square().mean(1, keepdim=True) + config.rms_norm_eps).sqrt()
        scale, base = self.weight(f"{name}scale"), self.weight(f"{name}base")
        pre = torch.sigmoid(values[:, :count] * scale[0] + base[:count]) + config.hc_eps
        post = 2 * torch.sigmoid(values[:, count : 2 * count] * scale[1] + base[count : 2 * count])
        comb = (values[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count)).softmax(-1)
        comb = comb + config.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + config.hc_eps)
        for _ in range(config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + config.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + config.hc_eps)
        return pre, post, comb

    def turn(self, layer: int, x: Tensor, positions: Sequence[int], *, back: bool = False) -> Tensor:
        """x [rows, ..., width]."""
        rope = self.config.rope(layer)
        out = x.clone()
        for row, position in enumerate(positions):
            for pair in range(rope.dim // 2):
                speed = rope.theta ** (-2 * pair / rope.dim)
                share = min(max((pair - rope.low) / (rope.high - rope.low), 0.0), 1.0)
                speed = speed * (1 - share) + speed / rope.factor * share
                angle = torch.tensor(position * speed * (-1 if back else 1), dtype=torch.float64)
                first = x.shape[-1] - rope.dim + 2 * pair
                a, b = x[row, ..., first], x[row, ..., first + 1]
                out[row, ..., first] = a * angle.cos() - b * angle.sin()
                out[row, ..., first + 1] = b * angle.cos() + a * angle.sin()
        return out

    def attention(self, layer: int, x: Tensor) -> Tensor:
        config, name, rows = self.config, f"layers.{layer}.attn.", range(x.shape[0])
        latent = self.norm(x @ self.weight(f"{name}wq_a.weight").T, f"{name}q_norm")
        queries = (latent @ self.weight(f"{name}wq_b.weight").T).unflatten(1, (config.num_attention_heads, -1))
        queries = self.turn(layer, queries, rows)
        keys = self.turn(layer, self.norm(x @ self.weight(f"{name}wkv.weight").T, f"{name}kv_norm"), rows)
        if layer in config.kv_source_layer_ids:
            self.write_entries(layer, x)
        if layer in config.index_source_layer_ids:
            self.select(layer, x, latent)
        looked = torch.zeros_like(queries)
        for row in rows:
            seen = keys[max(0, row - config.sliding_window + 1) : row + 1]
            source = config.kv_source(layer)
            if source is not None:
                seen = torch.cat((seen, self.entries[source][self.selected[row]]))
            scores = torch.exp(queries[row] @ seen.T * config.head_dim**-0.5)
            sink = torch.exp(self.weight(f"{name}attn_sink"))[:, None]
            looked[row] = scores @ seen / (scores.sum(1, keepdim=True) + sink)
        grouped = self.turn(layer, looked, rows, back=True).flatten(1).unflatten(1, (config.o_groups, -1))
        down = self.weight(f"{name}wo_a.weight").unflatten(0, (config.o_groups, -1))
        return torch.einsum("tgi,goi->tgo", grouped, down).flatten(1) @ self.weight(f"{name}wo_b.weight").T

    def write_entries(self, layer: int, x: Tensor) -> None:
        name, ratio = f"layers.{layer}.attn.", self.config.ratio(layer)
        raw = x @ self.weight(f"{name}compressor.wkv.weight").T
        groups = x.shape[0] // ratio
        if ratio > 1:
            scores = x @ self.weight(f"{name}compressor.wgate.weight").T
            tokens = groups * ratio
            weights = scores[:tokens].unflatten(0, (groups, ratio)).softmax(1)
            raw = (weights * raw[:tokens].unflatten(0, (groups, ratio))).sum(1)
        latent = self.norm(raw, f"{name}compressor.norm")
        positions = [group * ratio for group in range(groups)]
        self.entries[layer] = self.turn(layer, latent, positions)
        keys = self.norm(latent @ self.weight(f"{name}indexer.wk.weight").T, f"{name}indexer.k_norm")
        self.index_keys[layer] = self.turn(layer, keys, positions)

    def select(self, layer: int, x: Tensor, latent: Tensor) -> None:
        config, name, rows = self.config, f"layers.{layer}.attn.indexer.", range(x.shape[0])
        source = config.kv_source(layer)
        assert source is not None
        heads, width, block = config.index_n_heads, config.index_head_dim, config.candidate_block_size
        queries = self.turn(layer, (latent @ self.weight(f"{name}wq_b.weight").T).unflatten(1, (heads, -1)), rows)
        weights = x @ self.weight(f"{name}weights_proj.weight").T * width**-0.5 * heads**-0.5
        self.selected = []
        published: list[set[int]] = []
        for row in rows:
            visible = list(range((row + 1) // config.ratio(source)))
            keys = self.index_keys[source][: len(visible)]
            scores = (weights[row][:, None] * (queries[row] @ keys.T).relu()).sum(0).tolist()
            if layer == config.candidate_source_layer_id:
                best = {
                    number: max(scores[j] for j in visible if j // block == number)
                    for number in {j // block for j in visible}
                }
                if visible:
                    best[(len(visible) - 1) // block] = torch.inf
                kept = sorted(best, key=lambda number: (-best[number], number))[: config.candidate_topk_blocks]
                published.append({j for j in visible if j // block in kept})
            elif layer > config.candidate_source_layer_id:
                visible = [j for j in visible if j in self.candidates[row]]
            self.selected.append(sorted(sorted(visible, key=lambda j: (-scores[j], j))[: config.index_topk]))
        self.candidates = published or self.candidates

    def experts(self, name: str, x: Tensor, ids: Sequence[int]) -> Tensor:
        config = self.config
        scores = functional.softplus(x @ self.weight(f"{name}gate.weight").T).sqrt()
        out = torch.stack([self.expert(f"{name}shared_experts.", row) for row in x])
        for row in range(x.shape[0]):
            image = ids[row] == config.image_token_id
            biased = scores[row] + self.weight(f"{name}gate.bias_vl" if image else f"{name}gate.bias")
            chosen = sorted(range(len(biased)), key=lambda e: (-float(biased[e]), e))[: config.num_experts_per_tok]
            total = scores[row][chosen].sum() if len(chosen) > 1 else 1.0
            for expert in chosen:
                weight = scores[row][expert] / total * config.routed_scaling_factor
                out[row] += weight * self.expert(f"{name}experts.{expert}.", x[row])
        return out

    def expert(self, name: str, x: Tensor) -> Tensor:
        limit = self.config.swiglu_limit
        gate = (self.weight(f"{name}w1.weight") @ x).clamp(max=limit)
        up = (self.weight(f"{name}w3.weight") @ x).clamp(-limit, limit)
        return self.weight(f"{name}w2.weight") @ (functional.silu(gate) * up)

    def with_memory(self, layer: int, streams: Tensor, ids: Sequence[int]) -> Tensor:
        config, name = self.config, f"layers.{layer}.engram."
        layout = config.engram_layout(layer)
        assert layout is not None
        table, width = self.weight(f"{name}embed.weight"), config.hidden_size
        pad = int(self.token_map[config.engram_pad_token_id])
        out = streams.clone()
        for row, token in enumerate(ids):
            if token == config.image_token_id:
                continue
            accumulated, blocked, memory = 0, False, list[Tensor]()
            for back in range(config.engram_max_ngram_size):
                blocked = blocked or row < back or ids[row - back] == config.image_token_id
                source = pad if blocked else int(self.token_map[ids[row - back]])
                accumulated ^= source * layout.multipliers[back]
                for head in range(config.engram_n_heads if back else 0):
                    column = (back - 1) * config.engram_n_heads + head
                    memory.append(table[accumulated % layout.primes[column] + layout.offsets[column]])
            projected = self.weight(f"{name}wkv.weight") @ torch.cat(memory)
            for stream in range(config.hc_mult):
                key, query = projected[stream * width : (stream + 1) * width], streams[row, stream]
                weighted = query * self.weight(f"{name}q_weight")[stream] * self.weight(f"{name}k_weight")[stream] * key
                dot = weighted.sum() / (query.square().mean() * key.square().mean() * width).sqrt()
                root = dot.abs().clamp(min=1e-6).sqrt()
                out[row, stream] += torch.sigmoid(-root if dot < 0 else root) * projected[-width:]
        return out


def expand(y: Tensor, streams: Tensor, mix: Mix) -> Tensor:
    _, post, comb = mix
    return post[:, :, None] * y[:, None] + torch.einsum("tji,tjd->tid", comb, streams)
