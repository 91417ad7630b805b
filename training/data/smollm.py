"""SmolLM2-135M-Instruct as a batched writer: weights from a GGUF, a key cache by slot, one new token a slot and step.

    GGUF ──▶ Writer.prefill(prompts into slots) ──▶ Writer.step() … step() ──▶ Writer.texts

Plain torch in bfloat16 on a GPU (a step is replayed as one CUDA graph), in float32 on a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional

from .gguf_file import GgufFile

SIMPLE_TOKEN = re.compile(r"[ĠĊ]?[A-Za-z0-9 ,.'\"!?;:\-()]*[ĠĊ]?")

"""What may be written: plain English. A blank or a new line is spelled Ġ or Ċ."""

END, TURN = "<|im_end|>", "<|im_start|>"
CONTROL_TYPE = 3
"""llama.cpp's number for entries that are no text."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Tokens below `least` times the best one's probability are never taken. A token that would repeat four in a row
    loses `repeated` of its logit for each time that they have stood there."""

    temperature: float = 0.7
    least: float = 0.1
    repeated: float = 1.5


SAMPLING = Sampling()


def tokenizer_of(gguf: GgufFile) -> Tokenizer:
    """The file's byte-level BPE tokenizer: every digit is a token, words carry the blank before them."""
    pieces: list[str] = gguf.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf.metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = gguf.metadata["tokenizer.ggml.token_type"]
    special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == CONTROL_TYPE]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in special])
    return tokenizer


def conversation(system: str, user: str, opening: str) -> str:
    """The model's chat format, with the answer begun."""
    return f"{TURN}system\n{system}{END}\n{TURN}user\n{user}{END}\n{TURN}assistant\n{opening}"


@dataclass(frozen=True, slots=True)
class Prefix:
    """What many prompts begin with, computed once: `ids` [n] int64; keys, values [layers, kv heads, n, width]."""

    ids: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices are [out, in]; `qkv` and `gate_up` are several of them, one below the other."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    feed_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Writer:
    """`slots` texts at once, each of at most `rows` tokens, prompt included.

    `history` [slots, rows] int64 holds each slot's tokens; `positions` [slots] where its newest one lies; `ends`
    [slots] where its text ends, 0 while it does not.
    """

    def __init__(
        self, gguf: GgufFile, *, slots: int, rows: int, device: torch.device, seed: int, sampling: Sampling = SAMPLING
    ) -> None:
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._device = device
        self._sampling = sampling
        facts = gguf.metadata
        self.heads, self.kv_heads = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
        self.width = facts["llama.embedding_length"] // self.heads
        self._eps = facts["llama.attention.layer_norm_rms_epsilon"]
        layers = facts["llama.block_count"]
        self._layers = [self._read_layer(gguf, i) for i in range(layers)]
        self._embedding = self._tensor(gguf, "token_embd.weight")
        self._norm = self._tensor(gguf, "output_norm.weight")
        self._end_id = facts["tokenizer.ggml.eos_token_id"]
        pieces: list[str] = facts["tokenizer.ggml.tokens"]
        simple = [i for i, piece in enumerate(pieces) if i > 16 and SIMPLE_TOKEN.fullmatch(piece)]
        self._written = torch.tensor([self._end_id, *simple], device=device)
        self._head = self._embedding[self._written]
        self._places = torch.full((len(pieces),), -1, device=device)
        self._places[self._written] = torch.arange(len(self._written), device=device)
        self._turns = _turns(rows, self.width, facts["llama.rope.freq_base"], device)
        shape = (layers, slots, self.kv_heads, rows, self.width)
        self._keys = torch.zeros(shape, dtype=self._dtype, device=device)
        self._values = torch.zeros(shape, dtype=self._dtype, device=device)
        self.history = torch.zeros(slots, rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=device)
        self.ends = torch.zeros(slots, dtype=torch.int64, device=device)
        self._slots = torch.arange(slots, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self.attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = slot_attention_reference
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def prefix(self, ids: Sequence[int]) -> Prefix:
        """Compute what prompts will begin with."""
        there = torch.tensor(ids, device=self._device)
        computed = list(self._prefill_layers(there[None], None))
        return Prefix(there, torch.stack([k[0] for k, _ in computed]), torch.stack([v[0] for _, v in computed]))

    @torch.inference_mode()
    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], prefix: Prefix) -> None:
        """Begin texts in `slots`, each of `prefix` and its prompt, whose last token the next step computes."""
        shared, longest = len(prefix.ids), max(map(len, prompts))
        padded = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        ids = torch.from_numpy(padded).to(self._device)
        where = torch.tensor(slots, device=self._device)
        self.history[where, :shared] = prefix.ids
        self.history[where, shared : shared + longest] = ids
        self.positions[where] = torch.tensor([shared + len(prompt) - 1 for prompt in prompts], device=self._device)
        self.ends[where] = 0
        for index, (k, v) in enumerate(self._prefill_layers(ids, prefix)):
            self._keys[index][where, :, :shared] = prefix.keys[index]
            self._values[index][where, :, :shared] = prefix.values[index]
            self._keys[index][where, :, shared : shared + longest] = k
            self._values[index][where, :, shared : shared + longest] = v

    def capture(self) -> None:
        """Record a step as a CUDA graph, after one more step: libraries set themselves up outside of the recording."""
        self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._generator)
        with torch.cuda.graph(graph):
            self._step()
        self._graph = graph

    def step(self) -> None:
        """One more token in every slot; a slot that is full or has ended goes on with what nobody reads."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def logits(self) -> Tensor:
        """[slots, written] float32: of the token after each slot's newest, over the ids that may be written."""
        return functional.linear(self._hidden(), self._head).float()

    @torch.inference_mode()
    def _step(self) -> None:
        logits = self._less_repeated(self.logits()) / self._sampling.temperature
        weights = torch.exp(logits - logits.amax(dim=1, keepdim=True))
        weights = weights.masked_fill(weights < self._sampling.least ** (1 / self._sampling.temperature), 0.0)
        # The largest of weight / exponential is a draw by weight.
        rivals = torch.empty_like(weights).exponential_(generator=self._generator)
        chosen = self._written[(weights / rivals).argmax(dim=1)]
        at = torch.clamp(self.positions + 1, max=self.history.shape[1] - 1)
        self.history.index_put_((self._slots, at), chosen)
        self.positions.copy_(at)
        self.ends.copy_(torch.where((self.ends == 0) & (chosen == self._end_id), at, self.ends))

    def _less_repeated(self, logits: Tensor) -> Tensor:
        rows = self.history.shape[1]
        back = torch.arange(-2, 1, device=self._device)
        last = self.history.gather(1, (self.positions[:, None] + back).clamp(min=0))
        same = torch.stack([self.history[:, i : rows - 3 + i] == last[:, i : i + 1] for i in range(3)]).all(dim=0)
        same &= torch.arange(3, rows, device=self._device)[None] <= self.positions[:, None]
        places = self._places[self.history[:, 3:]]
        return logits.scatter_add_(1, places.clamp(min=0), (same & (places >= 0)) * -self._sampling.repeated)

    @torch.inference_mode()
    def _hidden(self) -> Tensor:
        """[slots, width of the model]; writes the newest rows' keys and values."""
        tokens = self.history.gather(1, self.positions[:, None])[:, 0]
        x = self._embedding[tokens]
        turns = self._turns[self.positions][:, None]
        mixed = self.heads + self.kv_heads
        for index, layer in enumerate(self._layers):
            qkv = functional.linear(self._normed(x, layer.attention_norm), layer.qkv).unflatten(1, (-1, self.width))
            turned = _turned(qkv[:, :mixed], turns)
            keys, values = self._keys[index], self._values[index]
            keys[self._slots, :, self.positions] = turned[:, self.heads :]
            values[self._slots, :, self.positions] = qkv[:, mixed:]
            x = x + functional.linear(self.attention(turned[:, : self.heads], keys, values, self.positions), layer.out)
            x = x + self._fed(x, layer)
        return self._normed(x, self._norm)

    def _prefill_layers(self, ids: Tensor, prefix: Prefix | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [prompts, kv heads, tokens, width] of `ids` [prompts, tokens] after `prefix`."""
        shared, (prompts, longest) = 0 if prefix is None else len(prefix.ids), ids.shape
        x = self._embedding[ids]
        turns = self._turns[shared : shared + longest][None, :, None]
        seen = torch.ones(longest, shared + longest, dtype=torch.bool, device=ids.device).tril(shared)
        mixed, group = self.heads + self.kv_heads, self.heads // self.kv_heads
        for index, layer in enumerate(self._layers):
            qkv = functional.linear(self._normed(x, layer.attention_norm), layer.qkv).unflatten(2, (-1, self.width))
            turned = _turned(qkv[:, :, :mixed], turns)
            q, k = turned[:, :, : self.heads].transpose(1, 2), turned[:, :, self.heads :].transpose(1, 2)
            v = qkv[:, :, mixed:].transpose(1, 2)
            yield k, v
            if prefix is not None:
                k = torch.cat([prefix.keys[index].expand(prompts, -1, -1, -1), k], dim=2)
                v = torch.cat([prefix.values[index].expand(prompts, -1, -1, -1), v], dim=2)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            mixed_rows = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + functional.linear(mixed_rows.transpose(1, 2).flatten(2), layer.out)
            x = x + self._fed(x, layer)

    def _fed(self, x: Tensor, layer: _Layer) -> Tensor:
        gate, up = functional.linear(self._normed(x, layer.feed_norm), layer.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, layer.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _tensor(self, gguf: GgufFile, *names: str) -> Tensor:
        parts = [torch.from_numpy(gguf.read(name)).to(self._device, self._dtype) for name in names]
        return torch.cat(parts)

    def _read_layer(self, gguf: GgufFile, index: int) -> _Layer:
        def read(*names: str) -> Tensor:
            return self._tensor(gguf, *(f"blk.{index}.{name}.weight" for name in names))

        return _Layer(
            attention_norm=read("attn_norm"),
            qkv=read("attn_q", "attn_k", "attn_v"),
            out=read("attn_output"),
            feed_norm=read("ffn_norm"),
            gate_up=read("ffn_gate", "ffn_up"),
            down=read("ffn_down"),
        )


def slot_attention_reference(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """What `slot_attention_kernel.slot_attention` computes, in plain torch."""
    slots, kv_heads, rows, width = keys.shape
    grouped = q.reshape(slots, kv_heads, -1, width)
    scores = (grouped @ keys.transpose(2, 3)) * width**-0.5
    unseen = torch.arange(rows, device=q.device)[None, :] > positions[:, None]
    scores = scores.masked_fill(unseen[:, None, None, :], float("-inf"))
    return (torch.softmax(scores.float(), dim=-1).to(q.dtype) @ values).reshape(slots, -1)


def _turns(rows: int, width: int, base: float, device: torch.device) -> Tensor:
    """[rows, width / 2] complex: what each pair of a head's values is turned by, by position."""
    speeds = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * speeds
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Neighbouring values are a pair, as GGUF's Llama weights are laid out. x [..., width]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
