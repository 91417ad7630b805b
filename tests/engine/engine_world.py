"""Engines over the tiny golden model, stepped by hand; their I/O workers are run between steps, in this thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

from whalepod.core.block_keys import chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.engine.engine import Delivery, Engine
from whalepod.engine.images import RequestImage, block_extras
from whalepod.engine.interface import (
    EngineRequest,
    Fidelity,
    FinishedEvent,
    Handoff,
    HandoffEvent,
    PromptTokensEvent,
    SampledToken,
    StepEvent,
    TokensEvent,
    Work,
)
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.runner import StepRunner
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.span_rows import SpanSource
from whalepod.engine.state_store import StateStore
from whalepod.model.tensor_layout import ModelRole

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"
OPTIONS = RankOptions(slots=4, blocks=64, chunk_tokens=64, chunk_tokens_beside_decode=32, async_scheduling=False)
"""In step with the test: what a step launches, it reports. `test_pipeline` runs one step ahead."""


@cache
def tiny_model(role: ModelRole = ModelRole.FULL) -> RankModel:
    """W = 16, K = 28, B = 16, R0 = 2, halo 90 to 105 rows."""
    return RankModel.load(CHECKPOINT, role=role)


def prompt_of(tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """The same first tokens for the same seed."""
    rng = Random(seed)
    return tuple(rng.randrange(3, 500) for _ in range(tokens))


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=1, top_p=0.95, seed=7, max_tokens=4, ignore_eos=True, logprobs=2)


@cache
def oracle(tokens: int, sampling: SamplingParams = GREEDY, *, seed: int = 0) -> tuple[SampledToken, ...]:
    """What one cold rank says after `prompt_of(tokens, seed=seed)`, alone and in one chunk."""
    world = World(options=replace(OPTIONS, slots=1, chunk_tokens=512))
    return tuple(world.generate(prompt_of(tokens, seed=seed), sampling, shares=False).tokens)


@dataclass(slots=True)
class Heard:
    """What an engine reported about one request."""

    tokens: list[SampledToken] = field(default_factory=list)
    prompt: list[SampledToken] = field(default_factory=list)
    """From its second token on, if log-probabilities were asked for."""
    handoff: Handoff | None = None
    ends: list[FinishedEvent] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def end(self) -> FinishedEvent:
        assert len(self.ends) == 1, self.ends
        return self.ends[0]


class RequestMaker:
    """Requests as a service would send them."""

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._count = 0

    def request(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        fidelity: Fidelity = Fidelity.EXACT,
        work: Work = Work.GENERATE,
        await_handoff: bool = False,
        shares: bool = True,
        name: str | None = None,
        attempt: int = 1,
        timeout_s: float = 1000.0,
        salt: bytes = b"",
        resumed: Sequence[int] = (),
        images: Sequence[RequestImage] = (),
    ) -> EngineRequest:
        """`name`: what its id is made of; else each is new. `shares`: whether its blocks have names. `resumed`: its
        output so far."""
        self._count += 1
        root = chain_root(self._model.namespace, salt=salt)
        extras = block_extras(images, block_tokens=self._model.block_tokens)
        hashes = derive_block_hashes(prompt, root=root, block_tokens=self._model.block_tokens, extras=extras)
        return EngineRequest(
            request_id=RequestId((name or f"request {self._count}").encode().ljust(16)),
            attempt=attempt,
            prompt_ids=prompt,
            sampling=sampling,
            fidelity=fidelity,
            deadline=Deadline.after(timeout_s),
            work=work,
            await_handoff=await_handoff,
            chain_root=root if shares else None,
            block_hashes=hashes if shares else (),
            resumed_ids=resumed,
            images=images,
        )


class World:
    """One engine and, if it has one, its store."""

    def __init__(
        self,
        *,
        store: StateStore | None = None,
        options: RankOptions = OPTIONS,
        role: ModelRole = ModelRole.FULL,
        instrument: Callable[[StepRunner], StepRunner] | None = None,
        spans: SpanSource | None = None,
        model: RankModel | None = None,
    ) -> None:
        model = tiny_model(role) if model is None else model
        self._answers: deque[Delivery] = deque()
        self.engine = Engine(
            model, options, store=store, deliver=self._answers.append, instrument=instrument, spans=spans
        )
        self.request = RequestMaker(model).request
        self.heard: dict[RequestId, Heard] = {}
        self.worked = False
        """The last step had I/O to do."""

    def submit(self, request: EngineRequest) -> Heard:
        self.engine.checks.check(request)
        self.engine.submit(request)
        return self.heard.setdefault(request.request_id, Heard())

    def transfer(self) -> bool:
        """Do all I/O that is queued, and tell the engine. False: there was none."""
        transfers, worked = self.engine.transfers, False
        while transfers is not None and (transfers.work_on_load(wait=False) or transfers.work_on_write(wait=False)):
            worked = True
        while self._answers:
            self.engine.answer(self._answers.popleft())
            worked = True
        return worked

    def step(self) -> list[StepEvent]:
        """One step, its events noted, its I/O done, blocks and slots conserved."""
        events = self.engine.step()
        for event in events:
            heard = self.heard.setdefault(event.request_id, Heard())
            match event:
                case TokensEvent():
                    heard.tokens += event.tokens
                case PromptTokensEvent():
                    assert not heard.tokens
                    assert event.start == 1 + len(heard.prompt), "once each, in order"
                    heard.prompt += event.tokens
                case HandoffEvent():
                    heard.handoff = event.handoff
                case FinishedEvent():
                    heard.ends.append(event)
        self.worked = self.transfer()
        self.engine.check()
        return events

    def run(self) -> None:
        """Until nothing happens any more."""
        while self.step() or self.worked or self.engine.runnable or self.engine.compiling:
            if self.engine.compiling and not self.engine.runnable:
                time.sleep(0.001)  # a thread is at it

    def generate(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **kinds: object) -> Heard:
        """Run one request to its end."""
        heard = self.submit(self.request(prompt, sampling, **kinds))  # type: ignore[arg-type]
        self.run()
        return heard


def prefill(world: World, prompt: Sequence[int], sampling: SamplingParams = GREEDY, **kinds: object) -> Handoff:
    """Run a prompt on a prefill rank."""
    heard = world.generate(prompt, sampling, work=Work.PREFILL, **kinds)
    assert heard.handoff is not None
    return heard.handoff


def decode(
    world: World, prompt: Sequence[int], handoff: Handoff, sampling: SamplingParams = GREEDY, **kinds: object
) -> Heard:
    """Continue a hand-off on a decode rank."""
    request = world.request(prompt, sampling, await_handoff=True, **kinds)  # type: ignore[arg-type]
    heard = world.submit(request)
    world.run()
    assert not heard.tokens
    world.engine.hand_off(request.request_id, request.attempt, handoff)
    world.run()
    return heard
