"""What a client was told, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

import grpc
import numpy as np

from tests.engine.engine_world import OPTIONS, World, tiny_model
from tests.engine.eviction_fuzz import of_hashes
from tests.simulation.plans import Ask
from whalepod.engine.interface import Fidelity, FinishReason, SampledToken
from whalepod.engine.sampling_params import SamplingParams

BLOCK_TOKENS = tiny_model().block_tokens
LATE_S = 0.5
"""What an answer may take past its deadline: it travels."""

PATIENCE_S = 10.0
"""Who has so long is answered also where something breaks meanwhile."""

TRUE_STATUSES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
"""What a cluster in trouble may say to a valid request. None of them blames the client, or says that we have a bug."""


@dataclass(frozen=True, slots=True)
class End:
    """What comes with the last of an answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    attempts: int | None = None
    """None: over HTTP nobody is told, nor of the rank."""
    prefill_rank: str = ""


@dataclass(slots=True)
class Answer:
    """What a client heard, and when."""

    ask: Ask
    began_s: float
    said: list[list[int]] = field(init=False)
    """Of each choice."""
    logprobs: list[float] = field(default_factory=list[float])
    """Of the first choice's tokens, if they were asked for; and of the prompt's."""
    scores: list[float] = field(default_factory=list[float])
    reasons: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])
    told: End | None = None
    """It counts when the answer has ended."""
    end: End | None = None
    status: grpc.StatusCode | None = None
    """None: it has not ended."""
    detail: str = ""
    ended_s: float = 0.0

    def __post_init__(self) -> None:
        self.said = [[] for _ in range(self.ask.choices)]

    @property
    def ok(self) -> bool:
        return self.status is grpc.StatusCode.OK

    def say(self, choice: int, ids: Iterable[int]) -> None:
        assert self.end is None, f"{self.ask.name}: something came after the end"
        assert choice not in self.reasons, f"{self.ask.name}: something came after the end of choice {choice}"
        self.said[choice] += ids

    def finish(self) -> None:
        assert self.end is None, f"{self.ask.name}: it ended twice"
        assert self.told is not None
        assert len(self.reasons) == len(self.said), f"{self.ask.name}: a choice has no end"
        self.end = self.told


def wrong_in(answer: Answer, others: Iterable[Answer], *, calm: bool, spared: bool) -> list[str]:
    """What a client can hold against us. `others`: all answers of the run. `calm`, `spared`: as of a `Plan`."""
    ask, wrong = answer.ask, list[str]()
    if answer.status is None:
        return ["it never ended"]
    if answer.ended_s > answer.began_s + ask.timeout_s + LATE_S and not ask.reads_every_s:
        wrong.append(f"it ended {answer.ended_s - answer.began_s:.3f} s after it was asked, of {ask.timeout_s:g} s")
    hung_up = answer.status is grpc.StatusCode.CANCELLED
    if hung_up and ask.hangs_up_after_s is None:
        wrong.append("it was cancelled, and not by its client")
    if answer.ok and answer.end is None:
        wrong.append(f"status {answer.status.name} without an end")
    if not answer.ok and answer.status not in TRUE_STATUSES:
        wrong.append(f"status {answer.status.name}: {answer.detail}")
    in_a_hurry = answer.status is grpc.StatusCode.DEADLINE_EXCEEDED and ask.timeout_s < PATIENCE_S
    if spared and not (answer.ok or hung_up or in_a_hurry):
        wrong.append(f"status {answer.status.name} though it could be served: {answer.detail}")
    known = _known_tokens(answer, others)
    alone = known < BLOCK_TOKENS and answer.end is not None and answer.end.attempts == 1
    for choice in range(ask.choices):
        wrong += _wrong_tokens(answer, choice, cold=calm and alone)
    if answer.end is not None:
        wrong += _wrong_usage(answer, known=known)
    return wrong


def _wrong_tokens(answer: Answer, choice: int, *, cold: bool) -> list[str]:
    """`cold`: it has met no state that others had left, and lost none of its own."""
    ask, ids = answer.ask, answer.said[choice]
    if ask.fidelity is Fidelity.FAST and not cold:
        limit = ask.sampling.max_tokens or 0
        may_stop = not ask.sampling.ignore_eos or bool(ask.sampling.stop_token_ids)
        complete = not answer.ok or may_stop or len(ids) == limit
        return [] if complete and len(ids) <= limit else [f"{len(ids)} tokens of {limit}"]
    if not answer.ok and not ids and not answer.scores:
        return []
    right = oracle(ask.prompt, ask.sampling)
    expected = list(right.ids) if answer.ok else list(right.ids[: len(ids)])
    wrong = [] if ids == expected else [f"said {ids}, not {expected}"]
    if answer.end is not None and answer.reasons[choice] is not right.reason:
        wrong.append(f"finish reason {answer.reasons[choice].value}, not {right.reason.value}")
    if ask.sampling.logprobs is not None and answer.logprobs != list(right.logprobs[: len(ids)]):
        wrong.append(f"log-probabilities {answer.logprobs}, not {right.logprobs}")
    scores = list(right.scores) if ids or answer.ok else list(right.scores[: len(answer.scores)])
    if answer.scores != scores:
        wrong.append(f"scores of the prompt {answer.scores}, not {right.scores}")
    return wrong


def _wrong_usage(answer: Answer, *, known: int) -> list[str]:
    """`known`: tokens of its prompt that may be stored where it may look."""
    ask, end, wrong = answer.ask, answer.end, list[str]()
    assert end is not None
    said = sum(map(len, answer.said))
    if (end.prompt_tokens, end.completion_tokens) != (len(ask.prompt), said):
        wrong.append(f"usage {end} for {len(ask.prompt)} + {said} tokens")
    if end.cached_tokens > known:
        wrong.append(f"{end.cached_tokens} cached tokens; those it may share with asked for {known} of its prompt")
    return wrong


def _known_tokens(answer: Answer, others: Iterable[Answer]) -> int:
    prompts = [other.ask.prompt for other in others if _may_hit(answer, other)]
    return max((_common(answer.ask.prompt, prompt) for prompt in prompts), default=0)


def _may_hit(answer: Answer, other: Answer) -> bool:
    """Whether it may have met state of the other's: of its own, only where an attempt, or its
    prefill, was lost."""
    if other is answer:
        return answer.end is not None and (answer.end.attempts != 1 or not answer.end.prefill_rank)
    domains = {(one.ask.tenant, one.ask.cache_salt) for one in (answer, other)}
    return len(domains) == 1 and other.began_s < answer.ended_s


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@cache
def _cold_rank() -> World:
    return World(options=replace(OPTIONS, slots=1, chunk_tokens=512), instrument=of_hashes)


@dataclass(frozen=True, slots=True)
class Right:
    """What is to be said, and why it ends. Log-probabilities as they travel, in single precision."""

    ids: tuple[int, ...]
    reason: FinishReason
    logprobs: tuple[float, ...]
    scores: tuple[float, ...]


@cache
def oracle(prompt: tuple[int, ...], sampling: SamplingParams) -> Right:
    """What one rank without a store says, alone and in one chunk."""
    heard = _cold_rank().generate(prompt, sampling, shares=False)
    return Right(tuple(heard.ids), heard.end.reason, _logprobs(heard.tokens), _logprobs(heard.prompt))


def _logprobs(tokens: Iterable[SampledToken]) -> tuple[float, ...]:
    return tuple(float(np.float32(token.logprob)) for token in tokens if token.logprob is not None)
