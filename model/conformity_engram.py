"""`engram.safetensors`: the token map, the hash tables, and the table rows that n-grams name."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from .config import ModelConfig
from .conformity import Comparison, Vectors
from .conformity_folder import VectorFolder
from .conformity_rows import token_list
from .engram import DEAD, compress, hash_rows, look_back
from .engram_token_map import engram_token_map
from .tokenizer import Tokenizer

TEXTS = "engram_texts.json"


def check_engram(c: Comparison, vectors: Vectors, folder: VectorFolder) -> None:
    name, config = next(iter(folder.checkpoints.items()))
    tokenizer = Tokenizer.from_dir(folder.path / name)
    token_map, prompts = engram_token_map(tokenizer, config), folder.prompts()
    _check_tables(c, vectors, config, token_map)
    for head in vectors.heads():
        if head.startswith("len"):
            ids = torch.tensor(token_list(prompts, f"engram_{head}" if f"engram_{head}" in prompts else head))
            c.equal(f"{head}.rows", table_rows(ids, config, token_map), vectors[f"{head}.rows"])
    _check_texts(c, vectors, folder, tokenizer, config, token_map)
    for head in vectors.heads():
        if head.startswith("masked"):
            ids = torch.tensor(token_list(prompts, f"engram_{head}"))
            _check_masked(c, vectors.below(f"{head}."), ids, config, token_map)


def table_rows(ids: Tensor, config: ModelConfig, token_map: Tensor) -> Tensor:
    """ids [tokens] of a whole sequence, DEAD for parts of an image -> [tokens, layers, columns]."""
    lookback = look_back(ids.tolist(), (), tokens=config.engram_max_ngram_size)
    compressed = compress(lookback, token_map, image_token_id=config.image_token_id)
    pad = int(token_map[config.engram_pad_token_id])
    return torch.stack([hash_rows(compressed, layout, pad_id=pad) for layout in config.engram], dim=1)


def _check_tables(c: Comparison, vectors: Vectors, config: ModelConfig, token_map: Tensor) -> None:
    c.equal("token_map", token_map, vectors["token_map"])
    c.equal("pad_compressed_id", token_map[[config.engram_pad_token_id]], vectors["pad_compressed_id"])
    for name in ("primes", "offsets", "multipliers"):
        got = torch.tensor([getattr(layout, name) for layout in config.engram])
        c.equal(name, got, vectors[name].flatten(1))


def _check_texts(
    c: Comparison,
    vectors: Vectors,
    folder: VectorFolder,
    tokenizer: Tokenizer,
    config: ModelConfig,
    token_map: Tensor,
) -> None:
    path = folder.path / TEXTS
    texts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    for index, text in enumerate(texts):
        ids = torch.tensor(tokenizer.encode(text))
        c.equal(f"text{index}.ids", ids, vectors[f"text{index}.ids"])
        c.equal(f"text{index}.rows", table_rows(ids, config, token_map), vectors[f"text{index}.rows"])


def _check_masked(c: Comparison, unit: Vectors, ids: Tensor, config: ModelConfig, token_map: Tensor) -> None:
    """`mask` 0 marks positions of an image; then text tokens follow."""
    ids = ids.masked_fill(unit["mask"] == 0, DEAD)
    c.equal("masked rows", table_rows(ids, config, token_map), unit["rows"])
    following = unit["next3_ids"].long()
    rows = table_rows(torch.cat((ids, following)), config, token_map)
    c.equal("rows after the mask", rows[len(ids) :], unit["next3_rows"])
