"""Packed masks, and how they change rows of logits."""

from __future__ import annotations

import numpy as np
import pytest

from whalepod.engine.grammar.masks import allocate, forbid, pack, unpack, words


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 6150, 129_280])
def test_a_mask_is_read_as_it_was_written_whatever_the_vocabulary(vocab_size: int) -> None:
    allowed = np.random.default_rng(vocab_size).random((3, vocab_size)) < 0.5
    packed = pack(allowed)
    assert (packed.shape, packed.dtype) == ((3, words(vocab_size)), np.uint32)
    assert np.array_equal(unpack(packed, vocab_size), allowed)


def test_token_t_is_bit_t_mod_32_of_word_t_div_32() -> None:
    allowed = np.zeros(70, np.bool_)
    allowed[[0, 33, 69]] = True
    assert pack(allowed).tolist() == [1, 2, 1 << 5]


@pytest.mark.parametrize("vocab_size", [5, 32, 45])
def test_what_a_mask_forbids_becomes_minus_infinity_row_by_row_and_nothing_else_changes(vocab_size: int) -> None:
    draws = np.random.default_rng(1)
    logits = draws.standard_normal((4, vocab_size), dtype=np.float32)
    allowed = draws.random((4, vocab_size)) < 0.5
    changed = logits.copy()
    forbid(changed, pack(allowed))
    assert np.array_equal(changed, np.where(allowed, logits, np.float32(-np.inf)))


def test_a_fresh_mask_allows_everything_and_bits_past_the_vocabulary_mean_nothing() -> None:
    logits = np.zeros((2, 45), np.float32)
    forbid(logits, allocate(2, 45))
    assert not logits.any()
