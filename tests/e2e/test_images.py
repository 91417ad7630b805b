"""Conversations with images through a whole served cluster: what the single-process engine says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.served_cluster import ServedCluster
from tests.model.vision.pictures import data_url, encoded, noise, plain
from whalepod import LLM, SamplingParams
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.slow

TOKENS = 12


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tmp_path_factory.mktemp("model") / "model"
    write_tiny_checkpoint(directory)
    llm = LLM(directory, context_tokens_max=1024)
    yield llm
    llm.close()


def messages(*pictures: bytes, words: int = 40) -> list[dict[str, Any]]:
    """Long enough for a hand-off."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this? " + "Look at it closely. " * words}]
    for picture in pictures:
        parts += [
            {"type": "image_url", "image_url": {"url": data_url(picture)}},
            {"type": "text", "text": "And then?"},
        ]
    return [{"role": "user", "content": parts}]


def said(cluster: ServedCluster, asked: list[dict[str, Any]]) -> tuple[list[int], int, int]:
    """Token ids, prompt tokens, cached tokens."""
    body = {"messages": asked, "thinking": {"type": "disabled"}, "temperature": 0, "max_tokens": TOKENS}
    extras = {"fidelity": "exact", "return_token_ids": True, "ignore_eos": True}
    with cluster.client() as client:
        response = client.post("/v1/chat/completions", json=body | extras, timeout=120.0)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    return answer["choices"][0]["token_ids"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def truth(oracle: LLM, asked: list[dict[str, Any]]) -> list[int]:
    (output,) = oracle.chat(asked, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    assert output.error is None
    return list(output.output.token_ids)


@pytest.mark.parametrize("pictures", [1, 3])
def test_a_cluster_sees_what_one_process_sees_cold_and_warm(cluster: ServedCluster, oracle: LLM, pictures: int) -> None:
    asked = messages(*(encoded(noise(120, 90, seed=seed)) for seed in range(pictures)))
    wanted = truth(oracle, asked)
    cold, tokens, cached = said(cluster, asked)
    assert (cold, cached) == (wanted, 0 if pictures == 1 else cached)
    warm, again, hit = said(cluster, asked)
    assert (warm, again) == (wanted, tokens)
    assert hit > 0


def test_another_image_under_the_same_text_is_another_prompt(cluster: ServedCluster, oracle: LLM) -> None:
    red, noisy = messages(encoded(plain(120, 90))), messages(encoded(noise(120, 90, seed=9)))
    answers = {name: said(cluster, asked) for name, asked in (("red", red), ("noise", noisy))}
    for name, asked in (("red", red), ("noise", noisy)):
        assert answers[name][0] == truth(oracle, asked)
    assert answers["red"][1] == answers["noise"][1], "as many tokens"
