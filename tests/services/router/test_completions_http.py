"""`/v1/completions` over HTTP, from a body to the bytes of the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.router.fake_ranks import Behaviour, FakeDecode, FakePrefill, expected_ids, says
from tests.services.router.router_under_test import RouterUnderTest, running_router
from whalepod.model.tiny_checkpoint import shipped_tokenizer
from whalepod.services.router.body_models import CompletionBody, SamplingBody, ServingBody
from whalepod.services.router.completions import REFUSED

LONG = [400 + index % 90 for index in range(100)]
TOKENIZER = shipped_tokenizer()


def text_of(events: list[str], index: int = 0) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def finish_of(events: list[str], index: int = 0) -> list[str]:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]


@pytest.mark.parametrize("prompt", [LONG, LONG[:5]], ids=["remote prefill", "local"])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_b1_b2_exactly_max_tokens_come_back(router: RouterUnderTest, prompt: list[int], max_tokens: int) -> None:
    answer = await router.complete(prompt=prompt, max_tokens=max_tokens, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected_ids(prompt, max_tokens)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    events = await router.stream(prompt=prompt, max_tokens=max_tokens, stream_options={"include_usage": True})
    assert text_of(events) == choice["text"]
    assert finish_of(events) == ["length"]
    assert json.loads(events[-2])["usage"] == answer["usage"]
    assert events[-1] == "[DONE]"


async def test_a_long_prompt_goes_through_the_prefill_rank_and_a_short_one_does_not(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    await router.complete(prompt=LONG, max_tokens=4)
    (handoff,) = decode.seen.handoffs
    assert handoff is not None
    assert handoff.boundary_tokens == len(LONG)
    await router.complete(prompt=LONG[:5], max_tokens=4)
    assert len(prefill.seen.starts) == 1
    assert [ticket.prefill_rank for ticket in decode.seen.tickets] == ["prefill-0", ""]


async def test_a_first_token_that_ends_the_request_ends_it_at_the_prefill_rank(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    answer = await router.complete(prompt=LONG, max_tokens=1, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected_ids(LONG, 1)
    await router.complete(prompt=LONG[:5], max_tokens=1)  # on the same stream, behind the cancel
    assert decode.seen.handoffs == []
    assert [key[1] for key in decode.seen.cancels] == [1]
    assert decode.live == {}


@pytest.mark.parametrize("burst", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 2, "return_token_ids": True}, {"stop": ["e"]}, {"echo": True}, {"echo": True, "logprobs": 1}],
)
async def test_a_stream_says_what_the_whole_answer_says(
    router: RouterUnderTest, decode: FakeDecode, burst: int, options: dict[str, Any]
) -> None:
    decode.behaviour.burst = burst
    for prompt in (LONG, "A short text"):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 13, "temperature": 0, **options}
        whole = (await router.complete(**body))["choices"][0]
        events = await router.stream(**body)
        chunks = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert text_of(events) == whole["text"]
        assert finish_of(events) == [whole["finish_reason"]]
        assert chunks[-1]["stop_reason"] == whole["stop_reason"]
        if options.get("return_token_ids"):
            assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
            assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        if options.get("logprobs"):
            parts = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [item for part in parts for item in part[key]] == whole["logprobs"][key]


async def test_log_probabilities_name_the_token_and_the_best(router: RouterUnderTest) -> None:
    answer = await router.complete(prompt=[400, 401], max_tokens=2, logprobs=3)
    logprobs = answer["choices"][0]["logprobs"]
    ids = expected_ids([400, 401], 2)
    assert logprobs["tokens"] == [TOKENIZER.token_bytes(token_id).decode() for token_id in ids]
    assert logprobs["token_logprobs"] == [-2 / 64, -3 / 64]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 3]
    assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0])]


async def test_zero_log_probabilities_are_the_tokens_own(router: RouterUnderTest) -> None:
    answer = await router.complete(prompt=[400], max_tokens=1, logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{logprobs["tokens"][0]: logprobs["token_logprobs"][0]}]


async def test_a_list_of_prompts_with_n_gives_each_its_choices_in_order(router: RouterUnderTest) -> None:
    prompts = [[400], [401, 402], LONG]
    answer = await router.complete(prompt=prompts, n=2, max_tokens=3, seed=9, return_token_ids=True)
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[index // 2] for index in range(6)]
    for index, prompt in enumerate(prompts):
        first, second = choices[2 * index], choices[2 * index + 1]
        assert first["token_ids"] == expected_ids(prompt, 3, seed=9), "choice 0 is what n=1 gives"
        assert second["token_ids"] != first["token_ids"]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts)), "a prompt is paid once"
    assert answer["usage"]["completion_tokens"] == 18
    events = await router.stream(prompt=prompts, n=2, max_tokens=3, seed=9)
    assert [text_of(events, index) for index in range(6)] == [choice["text"] for choice in choices]
    assert [finish_of(events, index) for index in range(6)] == [["length"]] * 6


@pytest.mark.parametrize("prompt", ["An echo, ünïcode", LONG])
async def test_an_echo_begins_with_the_prompt(router: RouterUnderTest, prompt: Any) -> None:
    plain = await router.complete(prompt=prompt, max_tokens=3)
    echoed = await router.complete(prompt=prompt, max_tokens=3, echo=True)
    prompt_text = prompt if isinstance(prompt, str) else b"".join(map(TOKENIZER.token_bytes, prompt)).decode()
    assert echoed["choices"][0]["text"] == prompt_text + plain["choices"][0]["text"]
    assert echoed["usage"] == plain["usage"]


@pytest.mark.parametrize("echo", [False, True])
async def test_b9_no_tokens_asked_is_a_legal_empty_completion(
    router: RouterUnderTest, decode: FakeDecode, echo: bool
) -> None:
    answer = await router.complete(prompt="Hello", max_tokens=0, echo=echo)
    assert answer["choices"][0]["text"] == ("Hello" if echo else "")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert decode.seen.starts == []


async def test_the_end_of_sequence_is_counted_and_not_spelled(router: RouterUnderTest, decode: FakeDecode) -> None:
    decode.behaviour.next_token = says(TOKENIZER.encode("Good bye"))
    answer = await router.complete(prompt=[400], max_tokens=16, skip_special_tokens=False)
    assert answer["choices"][0]["text"] == "Good bye"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(TOKENIZER.encode("Good bye")) + 1


@pytest.mark.parametrize("prompt", [[400], LONG], ids=["local", "remote prefill"])
async def test_b4_a_stop_id_stops_wherever_the_first_token_was_computed(
    router: RouterUnderTest, prompt: list[int]
) -> None:
    first, second, third = expected_ids(prompt, 3)
    for stop_id, count in ((first, 1), (third, 3)):
        answer = await router.complete(prompt=prompt, max_tokens=9, stop_token_ids=[stop_id], return_token_ids=True)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == [first, second, third][:count]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)
        spoken = b"".join(TOKENIZER.token_bytes(token_id) for token_id in choice["token_ids"][:-1])
        assert choice["text"] == spoken.decode("utf-8", "replace")


@pytest.mark.parametrize("prompt", [[400], LONG], ids=["local", "remote prefill"])
async def test_b4_a_stop_string_that_is_the_first_token_stops_at_once(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill, prompt: list[int]
) -> None:
    for rank in (decode, prefill):
        rank.behaviour.next_token = says(TOKENIZER.encode("Stop and go on for ever"))
    answer = await router.complete(prompt=prompt, max_tokens=9, stop="Stop")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "Stop")
    assert answer["usage"]["completion_tokens"] == len(TOKENIZER.encode("Stop"))
    assert decode.live == {}


@pytest.mark.parametrize("cached", [0, 64])
async def test_b7_cached_tokens_are_the_prefill_ranks_and_the_same_streamed(
    router: RouterUnderTest, prefill: FakePrefill, cached: int
) -> None:
    prefill.behaviour.cached_tokens = cached
    answer = await router.complete(prompt=LONG, max_tokens=4)
    other = LONG[::-1]  # of the same length; the first has been stored
    events = await router.stream(prompt=other, max_tokens=4, stream_options={"include_usage": True})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
    assert answer["usage"]["prompt_cache_hit_tokens"] == cached
    assert answer["usage"]["prompt_cache_miss_tokens"] == len(LONG) - cached
    assert json.loads(events[-2])["usage"] == answer["usage"]


async def test_b7_cached_tokens_of_a_local_prompt_are_known_even_if_a_stop_string_ends_it(
    router: RouterUnderTest, decode: FakeDecode
) -> None:
    decode.behaviour = Behaviour(next_token=says(TOKENIZER.encode("one two three")), cached_tokens=16)
    answer = await router.complete(prompt=LONG[:20], max_tokens=9, stop="two")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_a_state_that_the_store_did_not_take_is_computed_by_the_decode_rank(
    router: RouterUnderTest, decode: FakeDecode, prefill: FakePrefill
) -> None:
    prefill.behaviour.stored = False
    prefill.behaviour.cached_tokens = 64
    answer = await router.complete(prompt=LONG, max_tokens=4, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == expected_ids(LONG, 4)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, "the decode rank's, which computed all"
    assert len(decode.seen.starts) == 1


async def test_sampling_reaches_the_rank_as_it_was_asked(router: RouterUnderTest, decode: FakeDecode) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 7,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 11,
        "min_p": 0.125,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "seed": -(2**63),
        "logprobs": 20,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
    }
    masks: dict[str, Any] = {"allowed_token_ids": [9, 5], "bad_words": ["zq", " zq"]}
    await router.complete(**asked, **masks, logit_bias={"7": -100, "8": 1.5}, fidelity="exact", priority=-3)
    (work,) = decode.seen.starts
    for name, value in asked.items():
        got = getattr(work.sampling, name)
        assert (list(got) if name == "stop_token_ids" else got) == value
    assert dict(work.sampling.logit_bias) == {7: -100.0, 8: 1.5}
    assert work.sampling.allowed_token_ids == (9, 5)
    encode = router.front.language.tokenizer.encode
    assert work.sampling.bad_words == ()
    assert work.sampling.bad_word_ids == (tuple(encode("zq")), tuple(encode(" zq")))
    assert work.fidelity.value == "exact"
    assert work.priority == -3


async def test_tickets_carry_hashes_that_depend_on_the_salt_alone(router: RouterUnderTest, decode: FakeDecode) -> None:
    for salt in (None, "x", "x", "y"):
        await router.complete(prompt=LONG[:31], max_tokens=1, cache_salt=salt)
    first, x, again, y = [work.block_hashes for work in decode.seen.starts]
    assert [len(hashes) for hashes in (first, x, y)] == [1, 1, 1]
    assert x == again
    assert len({tuple(first), tuple(x), tuple(y)}) == 3


async def test_c12_tenants_never_share_a_hash(model_dir: Path, decode: FakeDecode) -> None:
    async with running_router(model_dir, [decode], prefill_replicas=0, trust_tenant_header=True) as router:
        for tenant in ("a", "b", "a"):
            await router.http.post(
                "/v1/completions", json={"prompt": LONG, "max_tokens": 1}, headers={"X-Tenant-Id": tenant}
            )
    a, b, again = [tuple(work.block_hashes) for work in decode.seen.starts]
    assert a == again
    assert not set(a) & set(b)


async def test_null_is_the_same_as_unset(router: RouterUnderTest) -> None:
    models = (ServingBody, CompletionBody, SamplingBody)
    names = {name for model in models for name in model.model_fields} | {*REFUSED, "best_of"}
    plain = await router.http.post("/v1/completions", json={"prompt": LONG[:4]})
    nulls = await router.http.post("/v1/completions", json={"prompt": LONG[:4], **dict.fromkeys(names - {"prompt"})})
    assert plain.status_code == nulls.status_code == 200
    assert {**plain.json(), "id": 0, "created": 0} == {**nulls.json(), "id": 0, "created": 0}


async def test_fields_nobody_knows_are_ignored(router: RouterUnderTest) -> None:
    await router.complete(prompt=LONG[:4], of_tomorrow={"a": [1]}, max_tokens=1)


@pytest.mark.parametrize("name", ["X-Request-Id", "x_request_id", "X-REQUEST_ID"])
async def test_the_request_id_is_echoed_however_the_header_is_spelled(router: RouterUnderTest, name: str) -> None:
    for path, body in (("/v1/completions", {"prompt": "a", "max_tokens": 1}), ("/v1/completions", {"prompt": ""})):
        response = await router.http.post(path, json=body, headers={name: "mine-7"})
        assert response.headers["x-request-id"] == "mine-7"
    async with router.http.stream(
        "POST", "/v1/completions", json={"prompt": "a", "stream": True}, headers={name: "mine-8"}
    ) as response:
        assert response.headers["x-request-id"] == "mine-8"


async def test_the_same_request_id_twice_names_two_requests_inside(router: RouterUnderTest, decode: FakeDecode) -> None:
    for _ in range(2):
        await router.http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-request-id": "same"}
        )
    assert len({work.request_id for work in decode.seen.starts}) == 2


async def test_without_a_request_id_the_answer_has_one(router: RouterUnderTest) -> None:
    assert (await router.http.get("/livez")).headers["x-request-id"]
