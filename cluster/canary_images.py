"""The canary with images: conversations through the cluster and through one process, compared like any other.

Cases come in pairs, the same words under the same salt with another picture: what is stored for the one must not be
found for the other. Each is asked twice, so that the second time meets stored state.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import grpc
import httpx
import numpy as np
from PIL import Image

from whalepod.core.errors import ServingError
from whalepod.engine.interface import Fidelity, SampledToken
from whalepod.engine.sampling_params import SamplingParams
from whalepod.rpc.router.v1 import router_pb2, router_pb2_grpc

from .canary_report import Answer, CanaryReport, answer_of_tokens, note_difference
from .config import ClusterConfig
from .error_codes import error_from_rpc
from .router_channel import key_metadata, open_router_channel

AT_A_TIME: Final = 4
REQUEST_TIMEOUT_S: Final = 300.0
WORDS: Final = ("What", "is", "in", "this", "picture", "and", "what", "colour", "are", "the", "shapes", "there", "?")
KINDS: Final = ("PNG", "JPEG", "WEBP", "GIF")
HANDED_OFF: Final = re.compile(r'^whalepod_router_handoffs_total\{outcome="handed_off"\} (\S+)$', re.MULTILINE)

Message = Mapping[str, Any]
ChatOracle = Callable[[Sequence[Sequence[Message]], Sequence[SamplingParams]], Sequence[Sequence[SampledToken]]]
"""Conversations and how to sample to the tokens of each. Blocks."""


@dataclass(frozen=True, slots=True)
class ImageCase:
    index: int
    salt: str
    messages: tuple[Message, ...]
    sampling: SamplingParams


def plan_image_cases(*, count: int, seed: int = 0) -> list[ImageCase]:
    """`count` cases, two of each pair beside each other. Pure; one seed, same cases."""
    rng = Random(seed)
    cases: list[ImageCase] = []
    for pair in range(-(-count // 2)):
        words = " ".join(rng.choices(WORDS, k=rng.randint(4, 120)))
        size = (rng.randint(1, 900), rng.randint(1, 700))
        more = pair % 3 == 2
        sampling = SamplingParams(
            temperature=float(pair % 2),
            seed=rng.randrange(2**31) if pair % 2 else None,
            max_tokens=rng.randint(6, 16),
            ignore_eos=True,
            logprobs=0,
        )
        for picture in range(2):
            pictures = [_picture(rng, *size, flat=picture == 1)] + [_picture(rng, 64, 64)] * more
            content: list[Message] = [{"type": "text", "text": words}]
            content += [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
            content.append({"type": "text", "text": "Say it in a word."})
            messages = ({"role": "user", "content": content},)
            cases.append(ImageCase(2 * pair + picture, f"pair {seed} {pair}", messages, sampling))
    return cases[:count]


def _picture(rng: Random, width: int, height: int, *, flat: bool = False) -> str:
    """A data URL: noise, or one colour."""
    noise = np.random.default_rng(rng.randrange(2**31)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels = np.broadcast_to(noise[:1, :1], noise.shape) if flat else noise
    kind, held = rng.choice(KINDS), io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(held, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(held.getvalue()).decode()}"


async def run_image_canary(
    config: ClusterConfig,
    *,
    requests: int,
    fidelity: Fidelity,
    seed: int,
    oracle: ChatOracle,
    say: Callable[[str], None],
    api_key: str | None = None,
) -> CanaryReport:
    """Ask the running cluster of `config`, ask the oracle, compare. What is asked again in `fast` is approximate by
    design and is not compared."""
    cases = plan_image_cases(count=requests, seed=seed)
    report = CanaryReport(requests=len(cases))
    say(f"asking the cluster: {len(cases)} conversations with images, twice each")
    before = await _handed_off(config)
    cold, warm = await _ask_cluster(config, cases, fidelity, api_key, report)
    report.handed_off = int(await _handed_off(config) - before)
    say("asking the oracle: the same conversations, one process, no store")
    drawn = await asyncio.to_thread(oracle, [case.messages for case in cases], [case.sampling for case in cases])
    truth = {case.index: answer_of_tokens(tokens) for case, tokens in zip(cases, drawn, strict=True)}
    for case in cases:
        for answers, what in ((cold, "cold"), (warm, "warm")):
            if case.index not in answers or (what == "warm" and fidelity is Fidelity.FAST):
                continue
            answer = answers[case.index]
            report.cached += what == "warm" and answer.cached_tokens > 0
            label = f"request {case.index} ({what}, with images, {answer.cached_tokens} cached)"
            note_difference(label, answer, as_told(truth[case.index], answer), report)
    # Pictures are seen at all: other pictures under the same words give other answers.
    pairs = zip(cases[::2], cases[1::2], strict=False)
    report.control_seen = any(truth[one.index] != truth[other.index] for one, other in pairs)
    return report


def as_told(truth: Answer, answer: Answer) -> Answer:
    """The truth with the scores that a chat completion tells: it leaves out those of tokens that are no part of a text
    (blanks before a tool call, an end of sequence that it went on after). What is told must be there, in order and to
    the bit, and something must be."""
    left = iter(truth.logprob_bits)
    found = bool(answer.logprob_bits) and all(told in left for told in answer.logprob_bits)
    return replace(truth, logprob_bits=answer.logprob_bits) if found else truth


async def _ask_cluster(
    config: ClusterConfig, cases: Sequence[ImageCase], fidelity: Fidelity, api_key: str | None, report: CanaryReport
) -> tuple[dict[int, Answer], dict[int, Answer]]:
    """First and second answers, by case index. Failed requests are counted and left out."""
    slots = asyncio.Semaphore(AT_A_TIME)
    rounds: tuple[dict[int, Answer], dict[int, Answer]] = ({}, {})
    async with open_router_channel(config) as channel:

        async def ask(case: ImageCase, answers: dict[int, Answer]) -> None:
            async with slots:
                try:
                    answers[case.index] = await _chat(channel, case, fidelity, api_key)
                except ServingError as error:
                    report.failed += 1
                    report.errors.append(f"request {case.index}: {type(error).__name__}: {error}")

        for answers in rounds:
            await asyncio.gather(*(ask(case, answers) for case in cases))
    return rounds


async def _chat(channel: grpc.aio.Channel, case: ImageCase, fidelity: Fidelity, api_key: str | None) -> Answer:
    sampling = case.sampling
    body: dict[str, Any] = {
        "messages": case.messages,
        "thinking": {"type": "disabled"},
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": True,
        "return_token_ids": True,
        "cache_salt": case.salt,
        "fidelity": fidelity.value,
    }
    stub: Any = router_pb2_grpc.RouterServiceStub(channel)
    try:
        request = router_pb2.ChatRequest(body_json=json.dumps(body))
        reply = await stub.Chat(request, timeout=REQUEST_TIMEOUT_S, metadata=key_metadata(api_key))
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None
    answer = json.loads(reply.body_json)
    (choice,) = answer["choices"]
    scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return Answer(
        token_ids=tuple(choice["token_ids"]),
        logprob_bits=tuple(struct.pack("<f", score) for score in scores),
        cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


async def _handed_off(config: ClusterConfig) -> float:
    """By the processes of the router so far."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        pages = [(await client.get(f"{url}/metrics", timeout=10.0)).text for url in config.operator_urls]
    return sum(float(found.group(1)) for page in pages if (found := HANDED_OFF.search(page)))
