"""What a forward computes does not depend on how its rows came to it (`spec/model.md` §10), and on nothing that is not
its own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from tests.model.network_world import (
    PLAIN,
    PLAIN64,
    TINY_A,
    Sequences,
    Weights,
    golden_config,
    golden_prompt,
    random_prompt,
    tiny_a,
    whole,
)
from whalepod.kernels.native import library
from whalepod.model.caches import Caches
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS, CacheFormats
from whalepod.model.tensor_layout import ModelRole

FORMATS = pytest.mark.parametrize("formats", [PLAIN, RELEASE_FORMATS], ids=["plain", "release"])
PROMPT = random_prompt(47, seed=3)


def test_logits_are_the_references() -> None:
    wanted = load_file(TINY_A / "prefill_f32.safetensors")["len31.logits"]
    torch.testing.assert_close(whole(tiny_a(), golden_prompt("len31")), wanted, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------- chunks, batches and order


@pytest.mark.parametrize(
    ("chunks", "floor", "formats"),
    [
        pytest.param([1], 0, RELEASE_FORMATS, marks=pytest.mark.slow),
        pytest.param([1], 17, PLAIN, marks=pytest.mark.slow),
        ([2, 9], 0, PLAIN),
        ([7], 17, RELEASE_FORMATS),
        ([16, 1], 0, RELEASE_FORMATS),
        ([31, 5, 1, 1], 17, RELEASE_FORMATS),
        ([33, 1, 1, 1], 17, PLAIN),
    ],
)
def test_any_chunking_gives_the_same_bits(chunks: list[int], floor: int, formats: CacheFormats) -> None:
    """Whole prompt, odd and even chunk ends, and token-by-token decode."""
    run = Sequences(tiny_a(), [PROMPT], formats, floors={0: floor})
    run.finish([{0: rows} for rows in chunks])
    assert torch.equal(run.all_logits(0), whole(tiny_a(), PROMPT, formats=formats, floor=floor))


@pytest.mark.usefixtures("arithmetic")
@FORMATS
def test_a_sequence_has_the_same_bits_alone_and_among_others(formats: CacheFormats) -> None:
    prompts = [random_prompt(tokens, seed=tokens) for tokens in (1, 47, 17, 12, 2, 33, 28)]
    alone = [whole(tiny_a(), prompt, formats=formats) for prompt in prompts]
    together = Sequences(tiny_a(), prompts, formats)
    together.finish([{3: 9, 0: 1, 6: 28, 1: 12, 4: 1}, {5: 33, 1: 30, 2: 3}, {2: 1, 1: 1, 3: 1, 4: 1}])
    for index, logits in enumerate(alone):
        assert torch.equal(together.all_logits(index), logits), f"sequence {index}"


@pytest.mark.parametrize("sequences", [2, 7, pytest.param(64, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_batches_of_any_size_order_and_chunking(sequences: int) -> None:
    """Chunks and decode rows of all sequences side by side, the order drawn anew for every batch."""
    rng = Random(sequences)
    prompts = [random_prompt(20 + index % 13, seed=index) for index in range(sequences)]
    floors = {index: rng.choice((0, 3, 17)) for index in range(sequences)}
    together = Sequences(tiny_a(), prompts, RELEASE_FORMATS, floors=floors)
    while any(together.done[index] < len(prompt) for index, prompt in enumerate(prompts)):
        order = rng.sample(range(sequences), sequences)
        together.step({index: 1 if together.done[index] >= 18 else rng.choice((1, 2, 5, 18)) for index in order})
    for index in rng.sample(range(sequences), min(sequences, 7)):
        alone = whole(tiny_a(), prompts[index], formats=RELEASE_FORMATS, floor=floors[index])
        assert torch.equal(together.all_logits(index), alone), f"sequence {index}"


def test_the_check_sees_ordinary_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the library's product of the whole batch, decode and prefill differ in bits."""
    monkeypatch.setattr(
        "whalepod.kernels.linear.reference.linear", lambda x, weight, out_dtype: (x @ weight.t()).to(out_dtype)
    )
    with library.chosen(wanted=False):
        run = Sequences(tiny_a(), [PROMPT[:9]])
        run.finish([{0: 1}])
        assert not torch.equal(run.all_logits(0), whole(tiny_a(), PROMPT[:9]))


def test_another_sequence_that_has_become_no_number_is_not_noticed() -> None:
    prompts = [PROMPT, random_prompt(47, seed=4)]
    run = Sequences(tiny_a(), prompts)
    run.step({0: 40, 1: 40})
    for caches in (run.caches.windows, run.caches.groups):
        for ring in caches.values():
            ring[1].view(torch.float32).fill_(torch.nan)
    run.finish([{0: 1, 1: 1}])
    assert torch.equal(run.all_logits(0), whole(tiny_a(), PROMPT))
    assert bool(run.logits[1][-1].isnan().all())


def test_a_segment_without_logits_returns_none() -> None:
    run = Sequences(tiny_a(), [PROMPT, PROMPT])
    silent = run.segment(0, 0, 20, logits_start=None)
    late = run.segment(1, 0, 20, logits_start=18)
    logits = tiny_a().forward([silent, late], run.caches)
    assert torch.equal(logits, whole(tiny_a(), PROMPT[:20])[18:])


# ---------------------------------------------------------------------------------------------- rolling back


@pytest.mark.parametrize(("start", "accepted"), [(30, 0), (30, 5), (31, 0), (31, 1), (31, 2)])
def test_verified_and_rejected_drafts_leave_no_trace(start: int, accepted: int) -> None:
    """Six rows are computed, some of them with wrong tokens; the next step starts after the accepted ones."""
    truth = PROMPT[: start + 12]
    run = Sequences(tiny_a(), [truth], RELEASE_FORMATS)
    run.step({0: start})
    wrong = [token + 1 for token in truth[start + 1 + accepted : start + 6]]
    drafts = truth[start : start + 1 + accepted] + wrong
    # Two steps may be in flight when the first one's drafts turn out to be wrong.
    tiny_a().forward([run.segment(0, start, start + 6, token_ids=drafts)], run.caches)
    tiny_a().forward([run.segment(0, start + 6, start + 12, history=drafts[-3:])], run.caches)
    run.done[0] = start + 1 + accepted
    run.finish([{0: 1}])
    wanted = whole(tiny_a(), truth, formats=RELEASE_FORMATS)
    assert torch.equal(torch.cat(run.logits[0][1:]), wanted[start + 1 + accepted :])


# ------------------------------------------------------------------------------------------ kept rows and replay


def test_rows_below_the_floor_stop_at_the_last_source() -> None:
    run = Sequences(tiny_a(), [PROMPT], floors={0: 38})
    run.step({0: 38})
    assert run.logits[0][0].shape == (0, 512)
    source = tiny_a().config.last_kv_source
    for layer, ring in run.caches.windows.items():
        assert bool(ring[0].any()) == (layer <= source), f"layer {layer}"
    run.step({0: 9})
    assert torch.equal(run.all_logits(0), whole(tiny_a(), PROMPT, floor=38))


def test_a_floor_at_the_start_changes_nothing() -> None:
    assert torch.equal(whole(tiny_a(), PROMPT, floor=0), whole(tiny_a(), PROMPT))


def test_the_last_row_is_exact_from_the_bound_of_kept_rows_on() -> None:
    """(layers above the last source) · (W - 1) + 1 rows: 3 · 15 + 1 = 46. One row fewer shows, in float64."""
    network, prompt = tiny_a(torch.float64), golden_prompt("tail")
    exact = whole(network, prompt, formats=PLAIN64)[-1]

    def last_row(kept: int) -> torch.Tensor:
        return (whole(network, prompt, formats=PLAIN64, floor=len(prompt) - kept)[-1] - exact).abs().max()

    assert last_row(46) < 1e-12 < last_row(45)


def replayed(network: Network, prompt: list[int], boundary: int, rows: int, formats: CacheFormats) -> torch.Tensor:
    """Logits from `boundary` on, when entries below it are given and windows are replayed from `rows` before it."""
    run = Sequences(network, [prompt, prompt], formats, floors={1: boundary})
    run.step({0: boundary})
    table, start = run.segment(0, 0, len(prompt)).block_table, boundary - rows
    fields = {"block_table": table, "window_start": start, "write_start": boundary}
    segments = [
        run.segment(1, start, boundary, **fields),
        run.segment(1, boundary, len(prompt), **fields),
    ]
    return torch.cat([network.forward([segment], run.caches) for segment in segments])


@FORMATS
def test_replay_from_the_start_equals_a_cold_prompt_bit_for_bit(formats: CacheFormats) -> None:
    wanted = whole(tiny_a(), PROMPT, formats=formats, floor=32)
    assert torch.equal(replayed(tiny_a(), PROMPT, 32, 32, formats), wanted)


def test_replay_of_the_halo_is_exact_and_of_one_row_fewer_is_not() -> None:
    """The halo of `ModelConfig.halo_rows`, whose last row shows in float64 only."""
    network, prompt, boundary = tiny_a(torch.float64), random_prompt(140, seed=8), 128
    halo = network.config.halo_rows(boundary=boundary, floor=boundary)
    assert halo == 105
    wanted = whole(network, prompt, formats=PLAIN64, floor=boundary)
    exact = (replayed(network, prompt, boundary, halo, PLAIN64) - wanted).abs().max()
    short = (replayed(network, prompt, boundary, halo - 1, PLAIN64) - wanted).abs().max()
    assert exact < 5e-14 < short


def test_replayed_rows_write_no_entry() -> None:
    prompt, boundary = random_prompt(80, seed=8), 64
    run = Sequences(tiny_a(), [prompt], RELEASE_FORMATS)
    run.step({0: boundary})
    pools = [*run.caches.global_kv.values(), *run.caches.index_keys.values()]
    before = [pool.clone() for pool in pools]
    tiny_a().forward([run.segment(0, 48, boundary, window_start=48, write_start=boundary)], run.caches)
    assert all(torch.equal(pool, copy) for pool, copy in zip(pools, before, strict=True))
    tiny_a().forward([run.segment(0, 48, boundary, window_start=48)], run.caches)
    assert not all(torch.equal(pool, copy) for pool, copy in zip(pools, before, strict=True))


# ------------------------------------------------------------------------------------------------------- roles


def cache_bytes(caches: Caches, layers: int) -> list[torch.Tensor]:
    pools = [*caches.global_kv.values(), *caches.index_keys.values(), *caches.groups.values()]
    return pools + [ring for layer, ring in caches.windows.items() if layer < layers]


@FORMATS
def test_the_encoder_leaves_the_same_bits_in_the_caches_as_the_full_model(formats: CacheFormats) -> None:
    encoder = tiny_a(role=ModelRole.ENCODER)
    source = encoder.config.last_kv_source
    assert len(encoder.layers) == source + 1
    prompts = [PROMPT, random_prompt(45, seed=6)]
    runs = [Sequences(network, prompts, formats, floors={0: 33, 1: 17}) for network in (tiny_a(), encoder)]
    runs[0].finish([{0: 17, 1: 45}])
    for batch in ({0: 30}, {1: 45, 0: 31}):
        segments = [
            runs[1].segment(index, runs[1].done[index], runs[1].done[index] + rows) for index, rows in batch.items()
        ]
        assert encoder.forward(segments, runs[1].caches).shape == (0, 512)
        for index, rows in batch.items():
            runs[1].done[index] += rows
    full, encoded = [cache_bytes(run.caches, source + 1) for run in runs]
    assert len(full) == len(encoded) == 3 + 3 + 2 + source + 1
    assert all(torch.equal(a, b) for a, b in zip(full, encoded, strict=True))


def test_rows_of_images_are_routed_by_a_bias_of_their_own() -> None:
    weights = Weights.draw(golden_config())
    others = {name: -tensor if name.endswith("bias_vl") else tensor for name, tensor in weights.tensors.items()}
    networks = [weights.network(), replace(weights, tensors=others).network()]
    image = weights.config.image_token_id
    assert image is not None
    prompt = PROMPT[:6] + [image] * 3 + PROMPT[6:9]
    first, second = (whole(network, prompt) for network in networks)
    assert torch.equal(first[:6], second[:6])
    assert bool((first[6:9] != second[6:9]).any(dim=1).all())
    assert torch.equal(whole(networks[0], PROMPT[:9]), whole(networks[1], PROMPT[:9]))


def test_rows_of_images_remember_no_n_gram() -> None:
    network, recorded = tiny_a(), dict[str, torch.Tensor]()
    image = network.config.image_token_id
    assert image is not None
    run = Sequences(network, [PROMPT[:5] + [image] * 4 + PROMPT[5:12]])
    network.forward([run.segment(0, 0, 16)], run.caches, recorder=recorded.__setitem__)
    changed = (recorded["layer0.out"] != recorded["layer1.engram_out"]).flatten(1).any(dim=1)
    assert changed.tolist() == [True] * 5 + [False] * 4 + [True] * 7
