"""Where records are read as they lie, a forward gives what it gives where they are gathered. On the CPU the kernels'
plain versions run: this tests which rows go where, not how they are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from tests.model.network_world import CHECKPOINT, Sequences, random_prompt
from whalepod.model.caches import Caches
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS


@pytest.fixture(scope="module")
def networks() -> tuple[Network, Network]:
    """Gathering, and reading in place."""
    return Network.load(CHECKPOINT, packed=False), Network.load(CHECKPOINT, packed=True)


def state(caches: Caches) -> Mapping[str, Tensor]:
    pools = {
        "global": caches.global_kv,
        "keys": caches.index_keys,
        "windows": caches.windows,
        "drafts": caches.draft_windows,
        "groups": caches.groups,
    }
    return {f"{kind}.{layer}": pool for kind, by_layer in pools.items() for layer, pool in by_layer.items()}


@pytest.mark.parametrize(
    ("chunks", "floors"),
    [
        ([{0: 100}], {}),
        ([{0: 100}], {0: 72}),
        ([{0: 41, 1: 7}, {0: 1, 1: 30}, {0: 5, 1: 3}, {0: 1, 1: 1}], {0: 30, 1: 12}),
        ([{0: 3}, {0: 13}, {1: 50}, {0: 6, 1: 1}, {0: 70, 1: 2}], {0: 60}),
        ([{0: 75, 1: 40}, *[{0: 1, 1: 1}] * 6], {0: 72}),
    ],
    ids=["whole", "floor", "mixed", "replay", "decode"],
)
def test_logits_and_caches_are_those_of_gathering(
    networks: tuple[Network, Network], chunks: Sequence[Mapping[int, int]], floors: Mapping[int, int]
) -> None:
    prompts = [random_prompt(100, seed=1), random_prompt(60, seed=2)]
    gathering, packed = (Sequences(network, prompts, RELEASE_FORMATS, floors=floors) for network in networks)
    for run in (gathering, packed):
        for chunk in chunks:
            run.step(chunk)
    for index, wanted in gathering.logits.items():
        for row, (ours, theirs) in enumerate(zip(packed.logits[index], wanted, strict=True)):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0, msg=f"sequence {index}, forward {row}")
    wanted = state(gathering.caches)
    for name, ours in state(packed.caches).items():
        assert torch.equal(ours, wanted[name]), name
