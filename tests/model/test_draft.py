"""The drafter guesses from its windows alone, the same bits in any batch, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.network_world import PLAIN, PLAIN64, Sequences, Weights, golden_config, random_prompt, tiny_a
from whalepod.model.draft import Anchor, Drafter, Drafts
from whalepod.model.record_formats import RELEASE_FORMATS, CacheFormats
from whalepod.model.tensor_layout import ModelRole

FORMATS = pytest.mark.parametrize("formats", [PLAIN, RELEASE_FORMATS], ids=["plain", "release"])
PROMPT = random_prompt(40, seed=5)


def drafter_of() -> Drafter:
    drafter = tiny_a().drafter
    assert drafter is not None
    return drafter


def computed(*prompts: list[int], formats: CacheFormats = PLAIN, chunk: int = 100, floor: int = 0) -> Sequences:
    run = Sequences(tiny_a(), prompts, formats, floors=dict.fromkeys(range(len(prompts)), floor))
    run.finish([dict.fromkeys(range(len(prompts)), chunk)])
    return run


def anchor(run: Sequences, index: int = 0, token: int = 9) -> Anchor:
    return Anchor(index, len(run.prompts[index]), token, window_start=run.floors.get(index, 0))


def same(first: Drafts, second: Drafts) -> bool:
    assert first.confidence is not None
    assert second.confidence is not None
    return torch.equal(first.logits, second.logits) and torch.equal(first.confidence, second.confidence)


@FORMATS
def test_a_round_has_the_same_bits_after_any_chunking_of_the_prompt(formats: CacheFormats) -> None:
    whole = computed(PROMPT, formats=formats, floor=12)
    wanted = drafter_of().draft([anchor(whole)], whole.caches)
    run = computed(PROMPT, formats=formats, chunk=7, floor=12)
    assert same(drafter_of().draft([anchor(run)], run.caches), wanted)


def test_anchors_have_the_same_bits_alone_and_together() -> None:
    prompts = [random_prompt(tokens, seed=tokens) for tokens in (1, 40, 17, 3)]
    run = computed(*prompts, formats=RELEASE_FORMATS)
    anchors = [anchor(run, index, token=index + 20) for index in (2, 0, 3, 1)]
    together = drafter_of().draft(anchors, run.caches)
    for index, single in enumerate(anchors):
        alone = drafter_of().draft([single], run.caches)
        assert torch.equal(together.logits[index], alone.logits[0])
        assert torch.equal(together.ids[index], alone.ids[0])


def test_a_round_changes_no_cache() -> None:
    run = computed(PROMPT)
    rings = [*run.caches.windows.values(), *run.caches.draft_windows.values(), *run.caches.groups.values()]
    before = [ring.clone() for ring in rings]
    drafter_of().draft([anchor(run)], run.caches)
    assert all(torch.equal(ring, copy) for ring, copy in zip(rings, before, strict=True))


def moved(run: Sequences, rows: int) -> Drafts:
    """A round from the last `rows` draft-window rows, and nothing else, in other caches."""
    other = Sequences(tiny_a(), run.prompts, run.formats)
    end = len(run.prompts[0])
    positions = torch.arange(max(0, end - rows), end) % run.caches.ring_rows
    for block, ring in other.caches.draft_windows.items():
        ring[0, positions] = run.caches.draft_windows[block][0, positions]
    return drafter_of().draft([anchor(run)], other.caches)


def test_w_draft_window_rows_are_all_a_round_needs_and_one_fewer_is_not_enough() -> None:
    run = computed(PROMPT)
    wanted = drafter_of().draft([anchor(run)], run.caches)
    window = tiny_a().config.window
    assert same(moved(run, window), wanted)
    assert float((moved(run, window - 1).logits - wanted.logits).abs().max()) > 1e-2


def test_rows_below_the_floor_are_no_context() -> None:
    run = computed(PROMPT, floor=30)
    wanted = drafter_of().draft([anchor(run)], run.caches)
    kept = torch.arange(30, 40) % run.caches.ring_rows
    for ring in run.caches.draft_windows.values():
        rows = ring[0, kept].clone()
        ring[0].view(torch.float32).fill_(3.0)
        ring[0, kept] = rows
    assert same(drafter_of().draft([anchor(run)], run.caches), wanted)


def test_each_draft_is_chosen_from_logits_that_know_the_one_before() -> None:
    run = computed(PROMPT)
    seen: list[Tensor] = []

    def second_best(number: int, logits: Tensor) -> Tensor:
        assert number == len(seen)
        seen.append(logits)
        return logits.topk(2).indices[:, 1]

    drafts = drafter_of().draft([anchor(run)], run.caches, choose=second_best)
    assert torch.equal(torch.stack(seen, dim=1), drafts.logits)
    assert drafts.ids[0].tolist() == [int(logits.topk(2).indices[0, 1]) for logits in seen]
    greedy = drafter_of().draft([anchor(run)], run.caches)
    assert torch.equal(greedy.ids, greedy.logits.argmax(dim=-1))
    assert torch.equal(greedy.logits[:, 0], drafts.logits[:, 0]), "the first depends on the anchor only"
    assert not torch.equal(greedy.logits[:, 1], drafts.logits[:, 1])


def test_rejected_rows_are_overwritten_in_the_draft_windows() -> None:
    run = Sequences(tiny_a(), [PROMPT], RELEASE_FORMATS)
    run.step({0: 30})
    wrong = [PROMPT[30], 7, 8, 9, 10, 11]
    tiny_a().forward([run.segment(0, 30, 36, token_ids=wrong)], run.caches)
    run.done[0] = 31
    run.finish([{0: 1}])
    clean = computed(PROMPT, formats=RELEASE_FORMATS)
    assert same(drafter_of().draft([anchor(run)], run.caches), drafter_of().draft([anchor(clean)], clean.caches))


def test_models_without_draft_blocks_and_encoders_have_no_drafter() -> None:
    config = golden_config(num_nextn_predict_layers=0, compress_ratios=[0, 0, 2, 2, 2, 2, 1, 1, 1, 1])
    assert Weights.draw(config).network().drafter is None
    assert tiny_a(role=ModelRole.ENCODER).drafter is None


@pytest.mark.parametrize("markov", [True, False])
def test_the_confidence_head_may_know_the_token_before_or_be_missing(markov: bool) -> None:
    config = golden_config(confidence_head_with_markov=markov)
    network = Weights.draw(config).network(torch.float64)
    run = Sequences(network, [PROMPT[:5]], PLAIN64)
    run.step({0: 5})
    assert network.drafter is not None
    first, second = (
        network.drafter.draft([anchor(run)], run.caches, choose=lambda _, logits, t=token: torch.tensor([t]))
        for token in (3, 4)
    )
    assert first.confidence is not None
    assert second.confidence is not None
    assert torch.equal(first.confidence[:, 0], second.confidence[:, 0])
    assert torch.equal(first.confidence[:, 1:], second.confidence[:, 1:]) != markov
    without = Weights.draw(golden_config(enable_confidence_head=False)).network()
    assert without.drafter is not None
    assert without.drafter.confidence is None
