from __future__ import annotations

import pytest
import torch

from tests.model.network_world import random_prompt
from whalepod.model.engram import DEAD, compress, hash_rows, look_back
from whalepod.model.engram_layout import EngramLayout, engram_layouts

RELEASED = engram_layouts((1, 14), vocab_size=16_000_000, max_ngram_size=4, n_heads=8, compressed_vocab_size=99092)
IMAGE = 60


def by_definition(ids: list[int], row: int, layout: EngramLayout, pad: int) -> list[int]:
    """Compressed ids, DEAD for parts of an image -> the table rows of the token at `row`."""
    rows: list[int] = []
    accumulated, blocked = 0, False
    for back, multiplier in enumerate(layout.multipliers):
        blocked = blocked or row < back or ids[row - back] == DEAD
        accumulated ^= (pad if blocked else ids[row - back]) * multiplier
        if back:
            heads = len(layout.primes) // (len(layout.multipliers) - 1)
            columns = range((back - 1) * heads, back * heads)
            rows += [accumulated % layout.primes[column] + layout.offsets[column] for column in columns]
    return rows


def test_rows_of_the_specification() -> None:
    """Appendix C: compressed ids 11, 7, 5, 3, newest first, in layer 1."""
    rows = hash_rows(torch.tensor([[11, 7, 5, 3]]), RELEASED[0], pad_id=2)[0].tolist()
    assert rows[:4] == [3507628, 26094887, 36875744, 59123204]
    assert rows[8:10] == [136697021, 155284773]
    assert rows[16] == 259313488
    assert rows[23] == 383729552


@pytest.mark.parametrize("images", [[], [4], [0, 1], [9, 10, 11]])
def test_hashes_equal_the_definition_in_plain_integers(images: list[int]) -> None:
    ids = random_prompt(14, seed=1, below=99092)
    for image in images:
        ids[image] = DEAD
    got = hash_rows(look_back(ids, (), tokens=4), RELEASED[1], pad_id=2)
    assert got.tolist() == [by_definition(ids, row, RELEASED[1], 2) for row in range(14)]


@pytest.mark.parametrize("border", [1, 2, 3, 4, 9])
def test_look_back_crosses_the_borders_of_chunks(border: int) -> None:
    """Invariant (v). The history is what came before, at most as long as the longest n-gram reaches."""
    ids = random_prompt(12)
    whole = look_back(ids, (), tokens=4)
    for history in (ids[max(0, border - 3) : border], ids[:border]):
        second = look_back(ids[border:], history, tokens=4)
        assert torch.equal(second, whole[border:])
    assert torch.equal(look_back(ids[:border], (), tokens=4), whole[:border])


def test_tokens_before_the_start_are_dead() -> None:
    assert look_back([5, 6], (), tokens=3).tolist() == [[5, DEAD, DEAD], [6, 5, DEAD]]


def test_compressing_maps_tokens_and_kills_images() -> None:
    token_map = torch.arange(100, dtype=torch.int32) // 4
    ids = torch.tensor([[8, IMAGE, 9], [DEAD, 99, 0]])
    assert compress(ids, token_map, image_token_id=IMAGE).tolist() == [[2, DEAD, 2], [DEAD, 24, 0]]
    assert compress(ids, token_map, image_token_id=None).tolist() == [[2, 15, 2], [DEAD, 24, 0]]
