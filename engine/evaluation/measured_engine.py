"""An engine that is asked things and watched: what it says, how likely it found what it was made to say, and what of a
prompt it took from the prefixes that it had computed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Final

import numpy as np
from numpy.typing import NDArray

from whalepod.core.block_keys import chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.engine.device import LaunchedRows
from whalepod.engine.engine import Delivery, Engine
from whalepod.engine.interface import (
    EngineRequest,
    Fidelity,
    FinishedEvent,
    FinishReason,
    PromptTokensEvent,
    StepEvent,
    StepWork,
    TokensEvent,
)
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.runner import RowLogits, StepRunner, on_host
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.model.draft import Anchor, Chooser, Drafts

SLOTS: Final = 16
GREEDY: Final = SamplingParams(temperature=0)
SURE: Final = 100.0
"""Logit of the only token that may be said where the answer is given."""

Note = Callable[[], None]
"""Called when a request has ended."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. With `said`, the answer is given: the network is asked how likely it finds it."""

    prompt_ids: Sequence[int]
    sampling: SamplingParams = GREEDY
    said: Sequence[int] = ()
    fidelity: Fidelity = Fidelity.FAST

    def params(self) -> SamplingParams:
        if not self.said:
            return self.sampling
        return replace(self.sampling, temperature=0, max_tokens=len(self.said), ignore_eos=True)


@dataclass(slots=True)
class Answered:
    ids: list[int] = field(default_factory=list[int])
    said: list[float] = field(default_factory=list[float])
    """Natural logarithms of the chances of a given answer's tokens."""
    prompt: list[float] = field(default_factory=list[float])
    """Of the prompt's tokens from the second on, if they were asked for."""
    cached_tokens: int = 0
    replayed_tokens: int = 0
    reason: FinishReason = FinishReason.STOP


class MeasuredEngine:
    """Keeps the blocks of what it has computed as long as it lives, if `reuse` is set. Not thread-safe."""

    def __init__(
        self,
        model: RankModel,
        *,
        context_tokens: int,
        reuse: bool = False,
        stored_tokens: int = 0,
        slots: int = SLOTS,
        speculation: SpeculationOptions | None = None,
    ) -> None:
        """`context_tokens`: of the longest prompt with its answer. `stored_tokens`: to be kept for reuse, of all
        requests together."""
        boundaries = model.boundaries
        context = context_tokens + (speculation.draft_tokens if speculation else 0) + 1
        options = RankOptions(
            slots=slots,
            blocks=slots * boundaries.blocks(context) + boundaries.blocks(stored_tokens) + 2,
            context_tokens_max=context,
            prefix_reuse=reuse,
            speculation=speculation,
            async_scheduling=False,
        )
        self._model = model
        self._reuse = reuse
        self._deliveries: SimpleQueue[Delivery] = SimpleQueue()
        self._forced: dict[RequestId, _Forced] = {}
        self._engine = Engine(
            model,
            options,
            store=None,
            deliver=self._deliveries.put,
            instrument=lambda r: _ForcingRunner(r, self._forced),
        )
        self._asked = 0
        self.steps: list[tuple[int, StepWork]] = []
        """Tokens that each step said, and its work."""

    def run(self, asked: Sequence[Asked], *, note: Note | None = None) -> list[Answered]:
        """All at once; answers in order. Raises the first error that a request ends with."""
        answers = {self._submit(one): Answered() for one in asked}
        for event in self._events():
            answer = answers[event.request_id]
            match event:
                case TokensEvent():
                    answer.ids += [token.id for token in event.tokens]
                case PromptTokensEvent():
                    answer.prompt += [token.logprob or 0.0 for token in event.tokens]
                case FinishedEvent():
                    _end(answer, event)
                    if note is not None:
                        note()
                case _:
                    raise AssertionError("a request that generates hands nothing off")
        for request_id, answer in answers.items():
            forced = self._forced.pop(request_id, None)
            answer.said = [] if forced is None else forced.scores
        return list(answers.values())

    def close(self) -> None:
        self._engine.close()

    def _submit(self, asked: Asked) -> RequestId:
        self._asked += 1
        request = EngineRequest(
            request_id=RequestId(f"measured {self._asked}".encode().ljust(16)),
            attempt=1,
            prompt_ids=asked.prompt_ids,
            sampling=asked.params(),
            fidelity=asked.fidelity,
            deadline=Deadline(math.inf),
        )
        if self._reuse:
            root = chain_root(self._model.namespace, salt=b"evaluation")
            tokens = self._model.block_tokens
            hashes = derive_block_hashes(request.prompt_ids, root=root, block_tokens=tokens)
            request = replace(request, chain_root=root, block_hashes=hashes)
        if asked.said:
            self._forced[request.request_id] = _Forced(len(asked.prompt_ids), asked.said)
        self._engine.checks.check(request)
        self._engine.submit(request)
        return request.request_id

    def _events(self) -> Iterator[StepEvent]:
        engine = self._engine
        while engine.runnable or engine.compiling:
            while not self._deliveries.empty() or (engine.compiling and not engine.runnable):
                engine.answer(self._deliveries.get())
            events = engine.step()
            said = sum(len(event.tokens) for event in events if isinstance(event, TokensEvent))
            # Nothing runs ahead: a step's events come with its work.
            self.steps += [(said, work) for work in engine.take_works()]
            yield from events


def _end(answer: Answered, event: FinishedEvent) -> None:
    if event.error is not None:
        raise event.error
    answer.reason = event.reason
    answer.cached_tokens, answer.replayed_tokens = event.cached_tokens, event.replayed_tokens


@dataclass(slots=True)
class _Forced:
    """A given answer, and what has been thought of it so far."""

    prompt_tokens: int
    ids: Sequence[int]
    scores: list[float] = field(default_factory=list[float])

    def replace(self, logits: NDArray[np.float32], *, position: int) -> NDArray[np.float32]:
        """logits [1, vocab] of the token at `position` -> logits under which nothing but the given token is said."""
        assert logits.shape[0] == 1, "given answers are not drafted"
        index = position - self.prompt_tokens
        assert index == len(self.scores), "an answer is said in order, each token once"
        row = logits[0].astype(np.float64)
        row -= row.max()
        token = self.ids[index]
        self.scores.append(float(row[token] - np.log(np.exp(row).sum())))
        sure = np.zeros_like(logits)
        sure[0, token] = SURE
        return sure


class _ForcingRunner:
    """Between an engine and its network. Rows, caches, hits and replays are the engine's; what is said is given."""

    def __init__(self, runner: StepRunner, forced: Mapping[RequestId, _Forced]) -> None:
        self._runner = runner
        self._forced = forced

    def run(self, rows: Sequence[LaunchedRows]) -> list[RowLogits | None]:
        results: list[RowLogits | None] = []
        for row, logits in zip(rows, self._runner.run(rows), strict=True):
            forced = self._forced.get(row.sequence.request.request_id)
            if forced is not None and row.draws and logits is not None:
                logits = forced.replace(on_host(logits), position=row.segment.end)
            results.append(logits)
        return results

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        return self._runner.draft(anchors, choose, tokens)
