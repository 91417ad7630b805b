"""One prompt over several ranks (threads of this process): the same caches and logits, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.model.network_world import Weights, golden_config, random_prompt
from whalepod.engine.context_parallel.rows import TransportRows
from whalepod.engine.expert_parallel.transport import MemoryHub
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.context_parallel import zigzag
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS, plain_formats

WEIGHTS = Weights.draw(golden_config())
NETWORK = WEIGHTS.network()


def caches_for(config: ModelConfig, tokens: int) -> Caches:
    blocks = -(-tokens // config.block_tokens)
    return Caches.allocate(config, blocks=blocks, slots=1, formats=plain_formats(torch.float32))


def chunks_of(prompt: Sequence[int], borders: Sequence[int], *, floor: int, caches: Caches) -> list[Segment]:
    blocks = range(next(iter(caches.global_kv.values())).shape[0])
    look_back = WEIGHTS.config.engram_max_ngram_size - 1
    return [
        Segment(
            slot=0,
            block_table=tuple(blocks),
            start=start,
            token_ids=tuple(prompt[start:end]),
            history=tuple(prompt[max(0, start - look_back) : start]),
            floor=floor,
            logits_start=end - 1 if end == len(prompt) else None,
        )
        for start, end in pairwise(borders)
    ]


def alone(network: Network, segments: Sequence[Segment], caches: Caches) -> torch.Tensor:
    return [network.forward([segment], caches) for segment in segments][-1]


def shared(network: Network, segments: Sequence[Segment], each: Sequence[Caches]) -> list[torch.Tensor]:
    hub = MemoryHub(len(each), timeout_s=30.0)

    def rank(index: int) -> torch.Tensor:
        try:
            exchange = TransportRows(hub.transports()[index])
            runs = [network.compute_shared(segment, each[index], exchange) for segment in segments]
            return network.logits(runs[-1])
        except BaseException:
            hub.barrier.abort()
            raise

    with ThreadPoolExecutor(len(each)) as threads:
        return list(threads.map(rank, range(len(each))))


def state_of(caches: Caches) -> Mapping[str, torch.Tensor]:
    kinds = ("global_kv", "index_keys", "windows", "draft_windows", "groups")
    return {f"{kind} {key}": value for kind in kinds for key, value in getattr(caches, kind).items()}


def assert_same(
    prompt: Sequence[int], borders: Sequence[int], ranks: int, *, floor: int, network: Network = NETWORK
) -> None:
    config = network.config
    one = caches_for(config, len(prompt))
    each = [caches_for(config, len(prompt)) for _ in range(ranks)]
    segments = chunks_of(prompt, borders, floor=floor, caches=one)
    wanted = alone(network, segments, one)
    for rank, logits in enumerate(shared(network, segments, each)):
        assert torch.equal(logits, wanted), f"logits of rank {rank}"
        for name, tensor in state_of(each[rank]).items():
            assert torch.equal(tensor, state_of(one)[name]), f"{name} of rank {rank}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_a_cold_prompt_leaves_the_same_blocks_and_says_the_same(tokens: int, ranks: int) -> None:
    floor = max(0, tokens - WEIGHTS.config.kept_rows)
    assert_same(random_prompt(tokens, seed=tokens), [0, tokens], ranks, floor=floor)


@pytest.mark.parametrize("borders", [[0, 40, 96], [0, 7, 33, 96], [0, 32, 64, 96]])
def test_chunks_of_a_prompt_may_be_divided_one_by_one(borders: list[int]) -> None:
    assert_same(random_prompt(96), borders, 2, floor=96 - WEIGHTS.config.kept_rows)


def test_a_prompt_whose_rows_are_all_kept_stays_divided_to_the_last_layer() -> None:
    assert_same(random_prompt(50, seed=9), [0, 50], 4, floor=0)


def test_packed_formats_are_gathered_as_they_are() -> None:
    config = WEIGHTS.config
    prompt = random_prompt(48, seed=3)
    one, two, three = (Caches.allocate(config, blocks=8, slots=1, formats=RELEASE_FORMATS) for _ in range(3))
    segments = chunks_of(prompt, [0, 48], floor=0, caches=one)
    wanted = alone(NETWORK, segments, one)
    for logits in shared(NETWORK, segments, [two, three]):
        assert torch.equal(logits, wanted)


@given(st.integers(1, 5000), st.integers(1, 16), st.integers(0, 100_000))
def test_every_row_is_computed_once_and_the_work_is_even(rows: int, ranks: int, start: int) -> None:
    parts = zigzag(rows, ranks)
    if not parts:
        assert rows < 4 * ranks or ranks == 1
        return
    assert sorted(row for chunks in parts for chunk in chunks for row in chunk) == list(range(rows))
    assert all(chunk.start % 2 == 0 for chunks in parts for chunk in chunks if len(chunk))
    if rows >= 1000 * ranks:
        work = [sum(np.sum(start + np.arange(c.start, c.stop)) for c in chunks) for chunks in parts]
        assert max(work) <= 1.01 * sum(work) / len(work)
