"""Choices of one prompt through a whole served cluster: what the single-process engine says, whatever the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.served_cluster import ServedCluster
from whalepod import LLM, SamplingParams
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.slow

SHORT = list(range(300, 330))
LONG = [300 + position * position % 900 for position in range(700)]
"""Some chunks of a prefill rank."""
N = 3


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model") / "model"
    write_tiny_checkpoint(directory)
    llm = LLM(directory, context_tokens_max=1024)
    yield llm
    llm.close()


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["on the decode rank", "handed off"])
def test_choices_with_one_seed_are_those_of_one_process_and_come_again(
    cluster: ServedCluster, oracle: LLM, prompt: list[int]
) -> None:
    (expected,) = oracle.generate([prompt], SamplingParams(n=N, seq_seed=7, max_tokens=12))
    wanted = [list(output.token_ids) for output in expected.outputs]
    assert len({tuple(ids) for ids in wanted}) == N
    body: dict[str, Any] = {"prompt": prompt, "n": N, "seed": 7, "max_tokens": 12, "fidelity": "exact"}
    with cluster.client() as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json=body | {"return_token_ids": True}, timeout=120.0).json()
            said = [choice["token_ids"] for choice in answer["choices"]]
            assert said == wanted
            assert answer["usage"]["prompt_tokens"] == len(prompt), "a prompt is paid once"
