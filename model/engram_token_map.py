"""The n-gram memory hashes compressed token ids: tokens that differ only in case, accents or blanks share one."""

from __future__ import annotations

from functools import lru_cache

import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from whalepod.core.errors import CheckpointError

from .config import ModelConfig
from .tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
LONE_BLANK = "\ue000"
"""Private character that carries a lone blank past the stripping."""


def engram_token_map(tokenizer: Tokenizer, config: ModelConfig) -> Tensor:
    """int32 [vocab_size]: compressed id of each token id, numbered in order of first appearance. Do not write to it.

    Ids without a token map as padding does; no text contains them. Raises CheckpointError if the tokenizer yields
    another number of compressed ids than `engram_compressed_vocab_size`: the tables were trained with another map.
    """
    if tokenizer.ids_end > config.vocab_size:
        raise CheckpointError(
            f"tokenizer.json has ids up to {tokenizer.ids_end - 1}, vocab_size is {config.vocab_size}"
        )
    compressed = _compress(tokenizer)
    distinct = len(set(compressed))
    if distinct != config.engram_compressed_vocab_size:
        raise CheckpointError(
            f"tokenizer.json gives {distinct} compressed token ids, "
            f"engram_compressed_vocab_size is {config.engram_compressed_vocab_size}"
        )
    padding = compressed[config.engram_pad_token_id]
    missing = config.vocab_size - len(compressed)
    return torch.tensor([*compressed, *[padding] * missing], dtype=torch.int32)


def compressed_vocab_size(tokenizer: Tokenizer) -> int:
    """Number of compressed ids that `tokenizer` yields."""
    return len(set(_compress(tokenizer)))


@lru_cache(maxsize=4)
def _compress(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Compressed id of each token id. The rules are the released reference's."""
    normalizer = _normalizer()
    ids_by_key: dict[str, int] = {}
    compressed: list[int] = []
    for token_id in range(tokenizer.ids_end):
        text = tokenizer.file.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT_CHARACTER in text:
            key = tokenizer.file.id_to_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        compressed.append(ids_by_key.setdefault(key, len(ids_by_key)))
    return tuple(compressed)


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex("[ \t\r\n]+"), " "),
            normalizers.Replace(Regex("^ $"), LONE_BLANK),
            normalizers.Strip(),
            normalizers.Replace(LONE_BLANK, " "),
        ]
    )
