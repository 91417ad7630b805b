"""A prompt's own log-probabilities: with the echo, as vLLM's field, over gRPC; told once, whatever happens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids
from tests.services.router.router_under_test import RouterUnderTest, running_router
from whalepod.client import AsyncClient
from whalepod.engine.interface import SampledToken
from whalepod.engine.sampling_params import SamplingParams
from whalepod.services.router.prompt_scores import ScoreBook, after_scores
from whalepod.services.router.text_choice import TextScores

PROMPT = [400 + index for index in range(40)]
SCORES = [None, *(-float(position) for position in range(1, len(PROMPT)))]


async def test_an_echo_with_log_probabilities_begins_with_the_prompts(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    answer = await router.complete(prompt=PROMPT, max_tokens=2, echo=True, logprobs=2)
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [*SCORES, -40 / 64, -41 / 64]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"][1:]), "the best, and the token itself"
    assert "".join(logprobs["tokens"]) == choice["text"]
    offsets = logprobs["text_offset"]
    assert [choice["text"][at:][: len(text)] for at, text in zip(offsets, logprobs["tokens"], strict=True)] == logprobs[
        "tokens"
    ]
    assert prefill.seen.starts == [], "one rank computes and scores all of the prompt"
    assert decode.seen.starts[0].sampling.prompt_logprobs == 2


async def test_a_text_is_scored_behind_its_first_token(router: RouterUnderTest) -> None:
    choice = (await router.complete(prompt="A short text", max_tokens=1, echo=True, logprobs=0))["choices"][0]
    assert choice["text"].startswith("A short text")
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -1.0, -2.0]
    assert choice["logprobs"]["text_offset"][:2] == [0, 0], "the begin of the sequence has no text"


async def test_nothing_may_be_generated_beside_the_scores(router: RouterUnderTest) -> None:
    answer = await router.complete(prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == SCORES
    assert (choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 0)
    assert (answer["usage"]["prompt_tokens"], len(choice["logprobs"]["tokens"])) == (40, 40)


@pytest.mark.parametrize("n", [1, 3])
async def test_vllms_field_names_each_token_and_the_best(router: RouterUnderTest, n: int) -> None:
    answer = await router.complete(prompt=[PROMPT, PROMPT[:1]], max_tokens=1, n=n, prompt_logprobs=1)
    for choice in answer["choices"][:n]:
        told = choice["prompt_logprobs"]
        assert told[0] is None
        assert [
            entry[str(token_id)]["logprob"] for entry, token_id in zip(told[1:], PROMPT[1:], strict=True)
        ] == SCORES[1:]
        assert told[1]["300"] == {"logprob": -0.5, "rank": 1, "decoded_token": told[1]["300"]["decoded_token"]}
    assert answer["choices"][n]["prompt_logprobs"] == [None]


async def test_a_conversation_has_them_beside_its_choices(router: RouterUnderTest) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = (await router.http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_they_are_not_streamed_apart(router: RouterUnderTest, path: str) -> None:
    body: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    response = await router.http.post(path, json={**body, "prompt_logprobs": 1})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_over_grpc_they_come_before_all_else(router: RouterUnderTest) -> None:
    async with AsyncClient(router.grpc_address) as client:
        sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
        assert list((await client.generate(PROMPT, sampling=sampling)).prompt_logprobs) == SCORES[1:]
        deltas = [delta async for delta in client.stream(PROMPT, sampling=sampling)]
    assert [score for delta in deltas for score in delta.prompt_logprobs] == SCORES[1:]
    first = next(index for index, delta in enumerate(deltas) if delta.token_ids)
    assert not any(delta.prompt_logprobs for delta in deltas[first:])


async def test_a_rank_that_dies_after_scoring_costs_no_score_and_repeats_none(
    model_dir: Path, decode: FakeDecode
) -> None:
    decode.behaviour = Behaviour(die_after_tokens=0, deaths=1)
    async with running_router(model_dir, [decode], prefill_replicas=0) as router:
        answer = await router.complete(prompt=PROMPT, max_tokens=2, echo=True, logprobs=0, return_token_ids=True)
    assert len(decode.seen.starts) == 2
    assert answer["choices"][0]["logprobs"]["token_logprobs"][:40] == SCORES
    assert answer["choices"][0]["token_ids"] == expected_ids(PROMPT, 2)


async def test_what_comes_before_a_book_is_whole_waits_for_it() -> None:
    def scores(start: int, count: int) -> TextScores:
        return TextScores(start, tuple(SampledToken(7, -float(start + index)) for index in range(count)))

    async def events() -> AsyncGenerator[tuple[int, Any], None]:
        for item in [(1, "early"), (0, scores(1, 2)), (2, "other"), (1, scores(1, 3)), (0, scores(3, 1)), (0, "late")]:
            yield item

    books = [ScoreBook(4), ScoreBook(0)]
    seen = [item async for item in after_scores(events(), books, choices_each=2)]
    assert seen == [(2, "other"), (1, "early"), (0, "late")]
    assert [score and score.logprob for score in books[0].scores] == [None, -1.0, -2.0, -3.0]
    assert json.dumps(books[1].scores) == "[null]"
