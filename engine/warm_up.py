"""Requests that nobody has made, computed before a rank serves: kernels are compiled, and graphs of decode steps
recorded, while no one waits for them.

a prompt of several chunks ─▶ batches that decode, the largest first, one for each shape of a graph ─▶ such a prompt
beside a request that decodes ─▶ all given back

They have no chain root: none of their blocks gets a name, so nothing is stored, and nothing is found again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.model.decode_graphs import batch_sizes

from .engine import Engine
from .interface import EngineRequest, Fidelity, FinishedEvent, HandoffEvent, PromptTokensEvent, TokensEvent, Work
from .options import RankOptions
from .rank_model import RankModel
from .sampling_params import SamplingParams
from .speculation.measuring import random_prompts

PROMPT_TOKENS: Final = 8
"""Of a request that decodes."""
STEPS_EACH: Final = 2
"""Of a batch of one size, from when all of it decodes: with `async_scheduling` the first was planned before."""
SAMPLINGS: Final = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=1, top_p=0.95, seed=0, ignore_eos=True),
    SamplingParams(temperature=1, top_k=50, ignore_eos=True),
)
"""They take turns: each is drawn by kernels of its own."""

Progress = Callable[[int, int], None]
"""Batches that are done, and all."""


def warm_up(
    engine: Engine,
    model: RankModel,
    options: RankOptions,
    *,
    fidelities: Sequence[Fidelity],
    work: Work,
    progress: Progress,
) -> None:
    """On the thread of an engine that holds no request. `work`: what is asked of it later; only a rank that generates
    decodes. Everything is given back, and nothing of it is in what the engine reports, or in what it has measured.

    Raises what a request ended with.
    """
    sizes = decode_batches(engine, model, options) if work is Work.GENERATE else []
    # Its first chunk is a whole one: only near a prompt's end chunks stop at borders.
    tokens = options.chunk_tokens + model.config.kept_rows + 2 * model.block_tokens
    tokens = max(1, min(tokens, engine.memory.context_tokens_max - 1))
    (prompt,) = random_prompts(model, 1, tokens=tokens, seed=0)
    total, done = len(fidelities) * (1 + len(sizes)), count(1)
    for fidelity in fidelities:
        requests = _Requests(engine, prompt, fidelity, _answer_tokens(options, sizes))
        requests.compute(work)
        progress(next(done), total)
        for size in sizes:
            requests.decode(size)
            progress(next(done), total)
        requests.end()
        if sizes and engine.memory.slots > 1:
            # It goes on until the prompt is done, however small the chunks are.
            requests.decode(1, answer_tokens=len(prompt) * _rows_each(options))
            requests.compute(work)
            requests.end()
    engine.check()
    engine.forget_steps()


def decode_batches(engine: Engine, model: RankModel, options: RankOptions) -> list[int]:
    """Numbers of requests that decode together, the largest first: as many as the rank's slots and blocks hold."""
    rows = _rows_each(options)
    sizes = batch_sizes(engine.memory.slots, rows=rows)
    blocks_each = model.boundaries.blocks(PROMPT_TOKENS + _answer_tokens(options, sizes))
    fit = engine.memory.blocks * 98 // 100 // blocks_each  # some stay free at an admission
    return batch_sizes(max(1, min(engine.memory.slots, fit)), rows=rows)


def _rows_each(options: RankOptions) -> int:
    return 1 if options.speculation is None else 1 + options.speculation.draft_tokens


def _answer_tokens(options: RankOptions, sizes: Sequence[int]) -> int:
    """The most that a request can say until all sizes have had their turn: prompts join step by step."""
    joining = max(sizes, default=0) * PROMPT_TOKENS // options.chunk_tokens_beside_decode
    return (joining + (2 + STEPS_EACH) * (1 + len(sizes))) * _rows_each(options)


@dataclass(slots=True)
class _Requests:
    """Of one fidelity."""

    engine: Engine
    prompt: tuple[int, ...]
    fidelity: Fidelity
    answer_tokens: int
    live: dict[RequestId, bool] = field(default_factory=dict)
    """Whether each has said a token, oldest first."""
    submitted: int = 0

    def compute(self, work: Work) -> None:
        """The whole prompt, and a token if one is due; beside those that decode."""
        request_id = self._submit(self.prompt, work, answer_tokens=1)
        self._run(lambda: request_id in self.live)

    def decode(self, size: int, *, answer_tokens: int | None = None) -> None:
        """Steps in which so many decode together. `answer_tokens`: of those that join."""
        for request_id in list(self.live)[size:]:
            self._cancel(request_id)
        room = self.engine.memory.context_tokens_max
        prompt = self.prompt[: min(PROMPT_TOKENS, max(1, room // 2))]
        for _ in range(size - len(self.live)):
            self._submit(
                prompt, Work.GENERATE, answer_tokens=min(answer_tokens or self.answer_tokens, room - len(prompt))
            )
        self._run(lambda: not all(self.live.values()))
        for _ in range(STEPS_EACH):
            self._step()

    def end(self) -> None:
        for request_id in list(self.live):
            self._cancel(request_id)
        while self.engine.runnable:
            self.engine.step()

    def _run(self, going: Callable[[], bool]) -> None:
        while going() and self.engine.runnable:
            self._step()

    def _step(self) -> None:
        for event in self.engine.step():
            match event:
                case TokensEvent():
                    self.live[event.request_id] = True
                case FinishedEvent():
                    del self.live[event.request_id]
                    if event.error is not None:
                        raise event.error
                case HandoffEvent() | PromptTokensEvent():
                    pass

    def _submit(self, prompt: tuple[int, ...], work: Work, *, answer_tokens: int) -> RequestId:
        request = EngineRequest(
            request_id=RequestId(f"warm-up {self.submitted}".encode().ljust(16)),
            attempt=1,
            prompt_ids=prompt,
            sampling=replace(SAMPLINGS[self.submitted % len(SAMPLINGS)], max_tokens=answer_tokens),
            fidelity=self.fidelity,
            deadline=Deadline(math.inf),
            work=work,
        )
        self.engine.checks.check(request)
        self.engine.submit(request)
        self.submitted += 1
        self.live[request.request_id] = False
        return request.request_id

    def _cancel(self, request_id: RequestId) -> None:
        self.engine.cancel(request_id, 1)
        del self.live[request_id]
