"""Trains the byte-level BPE tokenizer that ships with Whalepod (`whalepod checkpoint tokenizer`)."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .special_tokens import all_spellings

VOCAB_SIZE = 6144
"""Entries of the shipped tokenizer, special tokens and the 256 bytes included."""

# What a token may not cross: a word with the blank before it (`camelCase` is two), capitals, up to three digits,
# punctuation, or blanks. Every character belongs to one of them, so nothing is ever dropped.
PIECES = (
    r" ?\p{Lu}?[\p{Ll}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"| ?\p{Lu}+(?!\p{Ll})"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer with V4.1's special tokens: every UTF-8 text round-trips.

    Special tokens take the first ids (0 begin, 1 end, 2 padding). The same texts in the same order give the same file.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(spelling, special=True, normalized=False) for spelling in all_spellings()],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
