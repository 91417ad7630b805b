"""Networks, prompts and caches for tests of the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.checkpoint import EngramTable
from whalepod.model.config import ModelConfig
from whalepod.model.engram_layout import engram_layouts
from whalepod.model.network import Network
from whalepod.model.random_weights import random_weights
from whalepod.model.record_formats import CacheFormats, plain_formats
from whalepod.model.tensor_layout import ModelRole, tensor_specs

GOLDEN = Path(__file__).parents[1] / "golden"
TINY_A = GOLDEN / "tiny_a"
CHECKPOINT = TINY_A / "ckpt_f32"
PLAIN = plain_formats(torch.float32)
PLAIN64 = plain_formats(torch.float64)


@lru_cache
def tiny_a(dtype: torch.dtype = torch.float32, role: ModelRole = ModelRole.FULL) -> Network:
    """The network of the golden checkpoint: W = 16, K = 28, sources 2, 4 (ratio 2) and 6 (ratio 1)."""
    return Network.load(CHECKPOINT, dtype=dtype, role=role)


def golden_prompt(name: str) -> list[int]:
    return [int(token) for token in load_file(TINY_A / "prompts.safetensors")[name].tolist()]


def random_prompt(tokens: int, *, seed: int = 0, below: int = 490) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, below, (tokens,), generator=generator).tolist()]


def golden_config(**changes: object) -> ModelConfig:
    """The golden checkpoint's configuration with other text fields."""
    values = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    values.pop("vision_config")
    text = values["text_config"] = values["text_config"] | changes
    layouts = engram_layouts(
        text["engram_layer_ids"],
        vocab_size=text["engram_vocab_size"],
        max_ngram_size=text["engram_max_ngram_size"],
        n_heads=text["engram_n_heads"],
        compressed_vocab_size=text["engram_compressed_vocab_size"],
    )
    text["engram_num_embeddings"] = [layout.rows for layout in layouts]
    return ModelConfig.from_json(values)


@dataclass(frozen=True)
class Weights:
    """Random float32 weights of a configuration."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    token_map: Tensor

    @classmethod
    def draw(cls, config: ModelConfig, *, seed: int = 0) -> Weights:
        ids = torch.arange(config.vocab_size, dtype=torch.int32)
        token_map = ids % config.engram_compressed_vocab_size if config.engram_layer_ids else ids
        return cls(config, random_weights(tensor_specs(config), seed=seed), token_map)

    def network(self, dtype: torch.dtype = torch.float32, role: ModelRole = ModelRole.FULL) -> Network:
        tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        tables = {
            layer: EngramTable(self.tensors[f"layers.{layer}.engram.embed.weight"], None, dtype)
            for layer in self.config.engram_layer_ids
        }
        return Network(self.config, tensors, engram_tables=tables, token_map=self.token_map, role=role)


@dataclass
class Sequences:
    """Sequences on shared caches; sequence i owns slot i. Rows are computed in the batches that a test asks for."""

    network: Network
    prompts: Sequence[Sequence[int]]
    formats: CacheFormats = PLAIN
    floors: Mapping[int, int] = field(default_factory=dict)
    caches: Caches = field(init=False)
    logits: dict[int, list[Tensor]] = field(init=False)
    done: dict[int, int] = field(init=False)
    """Rows computed so far."""

    def __post_init__(self) -> None:
        config = self.network.config
        longest = max(len(prompt) for prompt in self.prompts)
        self.blocks_each = -(-longest // config.block_tokens)
        self.caches = Caches.allocate(
            config,
            blocks=self.blocks_each * len(self.prompts),
            slots=len(self.prompts),
            formats=self.formats,
            dtype=self.network.dtype,
            role=self.network.role,
        )
        self.logits = {index: [] for index in range(len(self.prompts))}
        self.done = dict.fromkeys(range(len(self.prompts)), 0)

    def segment(self, index: int, start: int, end: int, **fields: Any) -> Segment:
        prompt = self.prompts[index]
        # Tables run backwards: blocks of a sequence need not be in order.
        table = range((index + 1) * self.blocks_each - 1, index * self.blocks_each - 1, -1)
        lookback = self.network.config.engram_max_ngram_size - 1
        values: dict[str, Any] = {
            "slot": index,
            "block_table": table,
            "start": start,
            "token_ids": prompt[start:end],
            "history": prompt[max(0, start - lookback) : start],
            "floor": self.floors.get(index, 0),
            "logits_start": 0,
        }
        return Segment(**(values | fields))

    def step(self, rows: Mapping[int, int]) -> None:
        """Compute so many more rows of these sequences in one forward, as far as they go."""
        segments: list[tuple[int, Segment]] = []
        for index, count in rows.items():
            start = self.done[index]
            end = min(start + count, len(self.prompts[index]))
            if end > start:
                segments.append((index, self.segment(index, start, end)))
                self.done[index] = end
        if not segments:
            return
        logits = self.network.forward([segment for _, segment in segments], self.caches)
        for index, segment in segments:
            kept = max(0, segment.end - max(segment.start, segment.floor))
            self.logits[index].append(logits[:kept])
            logits = logits[kept:]
        assert len(logits) == 0

    def finish(self, chunks: Iterable[Mapping[int, int]]) -> None:
        """Repeat these batches until every sequence they name is done."""
        plan = list(chunks)
        while any(self.done[index] < len(self.prompts[index]) for batch in plan for index in batch):
            for batch in plan:
                self.step(batch)

    def all_logits(self, index: int) -> Tensor:
        """Of the rows at and above the floor."""
        return torch.cat(self.logits[index])


def whole(network: Network, prompt: Sequence[int], *, formats: CacheFormats = PLAIN, floor: int = 0) -> Tensor:
    """Logits of the kept rows of one prompt, computed alone and at once."""
    alone = Sequences(network, [prompt], formats, floors={0: floor})
    alone.step({0: len(prompt)})
    return alone.all_logits(0)
