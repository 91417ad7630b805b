"""What trains is what serves: logits, drafts and confidences of whole batches are those of `Network`, mode `off`.

In float64 with the release's quantised caches: the two add in different orders, and in float32 a value between two FP4
codes would fall to either side.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor

from tests.model.network_world import Sequences, Weights
from whalepod.model.config import ModelConfig
from whalepod.model.draft import Anchor
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.training.backbone import Backbone, Options, Pass, places_within
from whalepod.training.configuration import trained_config_json
from whalepod.training.drafting import Drafting
from whalepod.training.parameters import stacked, unstacked

TOKENS = 112
"""Seven windows of the smoke configuration; selections hold 8 entries, candidates 16."""
TOLERANCE = 1e-10
SECOND_STARTS = 48


@lru_cache
def weights() -> Weights:
    return Weights.draw(ModelConfig.from_json(trained_config_json(shipped_tokenizer(), size="smoke")), seed=1)


@lru_cache
def network() -> Network:
    return weights().network(torch.float64)


def text(seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(20, 6000, (TOKENS,), generator=generator).tolist()]


def tensors() -> dict[str, Tensor]:
    return stacked({name: tensor.double() for name, tensor in weights().tensors.items()})


def backbone() -> Backbone:
    return Backbone(weights().config, weights().token_map, dtype=torch.float64, device=torch.device("cpu"))


@lru_cache
def trained_pass() -> tuple[Pass, Tensor]:
    """Two sequences: one document, and the same tokens as two documents."""
    ids = torch.tensor([text(), text()])
    documents = torch.zeros_like(ids)
    documents[1, SECOND_STARTS:] = 1
    with torch.no_grad():
        run = backbone().forward(tensors(), ids, documents, Options())
        return run, backbone().logits(tensors(), run)


def served(prompt: list[int]) -> Tensor:
    sequences = Sequences(network(), [prompt], RELEASE_FORMATS)
    sequences.step({0: len(prompt)})
    return sequences.all_logits(0)


@pytest.mark.parametrize(("row", "start", "end"), [(0, 0, TOKENS), (1, 0, SECOND_STARTS), (1, SECOND_STARTS, TOKENS)])
def test_logits_are_the_servers(row: int, start: int, end: int) -> None:
    wanted = served(text()[start:end])
    found = trained_pass()[1][row, start:end]
    assert float((wanted - found).abs().max()) < TOLERANCE
    assert float(wanted.std()) > 1


def test_limits_of_window_selection_and_candidates_are_all_passed() -> None:
    config, run = weights().config, trained_pass()[0]
    assert config.window < TOKENS
    assert run.chosen is not None and run.candidates is not None and run.visible is not None
    assert int(run.chosen[0].sum(dim=1).max()) == config.index_topk < int(run.visible[0, -1].sum())
    assert int((run.candidates & run.visible)[0, -1].sum()) < int(run.visible[0, -1].sum())


@pytest.mark.parametrize(
    ("row", "start", "place"), [(0, 0, 0), (0, 0, 90), (1, SECOND_STARTS, 50), (1, SECOND_STARTS, 90)]
)
def test_drafts_and_confidences_are_the_servers(row: int, start: int, place: int) -> None:
    known, config = text(), weights().config
    anchors = torch.tensor([0, 50, 90])
    with torch.no_grad():
        rounds = Drafting(backbone()).forward(tensors(), trained_pass()[0], anchors)
    drafter = network().drafter
    assert drafter is not None
    before = Sequences(network(), [[*known[start:place], 0]], RELEASE_FORMATS)
    before.step({0: place - start})
    drafts = drafter.draft(
        [Anchor(0, place - start, known[place])],
        before.caches,
        choose=lambda number, _: torch.tensor([known[place + 1 + number]]),
    )
    group = row * len(anchors) + anchors.tolist().index(place)
    assert drafts.confidence is not None
    assert drafts.logits.shape[1] == config.dspark_block_size
    assert float((drafts.logits[0] - rounds.logits[group]).abs().max()) < TOLERANCE
    assert float((drafts.confidence[0] - rounds.confidence[group]).abs().max()) < TOLERANCE


def test_every_trained_tensor_gets_a_gradient() -> None:
    trained = {name: tensor.requires_grad_(True) for name, tensor in tensors().items()}
    ids = torch.tensor([text(), text(1)])
    run = backbone().forward(trained, ids, torch.zeros_like(ids), Options(index_loss=True))
    rounds = Drafting(backbone()).forward(trained, run, torch.tensor([3, 90]))
    loss = backbone().logits(trained, run).logsumexp(dim=-1).mean() + rounds.logits.logsumexp(dim=-1).mean()
    (loss + rounds.confidence.sum() + torch.stack(run.index_losses).sum()).backward()
    without = {name for name, tensor in trained.items() if tensor.grad is None or not tensor.grad.abs().sum() > 0}
    assert {name for name in without if not name.startswith(("vision.", "aligner.", "image_"))} == {
        name for name in trained if name.endswith(("gate.bias", "gate.bias_vl"))
    }


def test_stacking_loses_nothing() -> None:
    names = weights().tensors
    again = unstacked(stacked(names))
    assert set(again) == set(names)
    assert all(torch.equal(again[name], tensor) for name, tensor in names.items())


def test_places_start_anew_in_every_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 5, 5, 5, 5, 5]])
    assert places_within(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
