"""The offline interface: one rank in this process, no store, no thread. It is the oracle for the cluster.

from whalepod import LLM, SamplingParams
outputs = LLM(model_dir).generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import Progress

from whalepod.core.clock import Deadline
from whalepod.core.errors import ServingError
from whalepod.core.ids import RequestId, mint_request_id
from whalepod.model.detokenizer import Detokenizer
from whalepod.model.prompt import PromptEncoder

from .engine import Delivery, Engine
from .interface import EngineRequest, Fidelity, FinishedEvent, FinishReason, SampledToken, StepEvent, TokensEvent
from .options import RankOptions
from .rank_model import RankModel
from .sampling_params import SamplingParams

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
"""{"role": …, "content": …}"""

SERVED_NAME = "model"


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `text` is of `tokens` without special tokens."""

    tokens: tuple[SampledToken, ...]
    text: str
    finish_reason: FinishReason
    matched_stop_id: int | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of one prompt. With an `error`, its output is what had been generated before."""

    prompt_ids: tuple[int, ...]
    output: CompletionOutput
    error: ServingError | None = None


@dataclass(slots=True)
class _Progress:
    prompt_ids: tuple[int, ...]
    tokens: list[SampledToken] = field(default_factory=list)
    end: FinishedEvent | None = None
    error: ServingError | None = None

    @property
    def failed(self) -> bool:
        """It was refused."""
        return self.error is not None


class LLM:
    """A loaded model that answers batches of prompts. Not thread-safe."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        block_tokens: int | None = None,
        fidelity: str | Fidelity = Fidelity.EXACT,
        context_tokens_max: int | None = None,
        slots: int = 16,
        blocks: int | None = None,
        chunk_tokens: int = 512,
        quantized_caches: bool = True,
        threads: int = 1,
    ) -> None:
        """Reads the weights. What the model decides if None: `block_tokens`, `context_tokens_max`.

        Raises ConfigError or CheckpointError, ValueError on an unknown fidelity.
        """
        self._fidelity = Fidelity(fidelity)
        model = RankModel.load(model_dir, block_tokens=block_tokens, quantized_caches=quantized_caches, threads=threads)
        options = RankOptions(
            slots=slots, blocks=blocks, chunk_tokens=chunk_tokens, context_tokens_max=context_tokens_max
        )
        self._tokenizer = model.tokenizer
        self._config = model.config
        self._answers: SimpleQueue[Delivery] = SimpleQueue()
        self._engine = Engine(model, options, store=None, deliver=self._answers.put)
        self._context_tokens = self._engine.memory.context_tokens_max

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. A prompt that fails does not lose the others.

        A text becomes the begin-of-sequence token and its tokens, none of which is special; a list of ids is taken as
        it is. `params`: for all prompts, or one for each. `use_tqdm`: show on stderr how many have ended. Raises
        ValueError if their numbers differ.
        """
        return self._answer([self._ids(prompt) for prompt in _listed(prompts)], params, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        thinking: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """One answer a conversation, in order, as `generate` would give for its prompt. `messages`: one conversation or
        several, in the form of the HTTP API, whose rules for sampling do not apply here.

        Raises RequestError on messages that the prompt format does not take, CheckpointError if the tokenizer lacks the
        special tokens of that format.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        kind = {"type": "enabled" if thinking else "disabled"}
        prompts = [
            self._encoder.chat(
                {"model": SERVED_NAME, "messages": list(conversation), "thinking": kind, "max_tokens": 1},
                context_tokens=self._context_tokens,
            ).prompt_ids
            for conversation in conversations
        ]
        return self._answer([tuple(prompt) for prompt in prompts], params, use_tqdm=use_tqdm)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._tokenizer, self._config, served_names=(SERVED_NAME,))

    def _answer(
        self,
        listed: Sequence[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling parameters")
        progress = {mint_request_id(): _Progress(prompt) for prompt in listed}
        for (request_id, its_progress), sampling in zip(progress.items(), each, strict=True):
            self._submit(request_id, its_progress, sampling)
        with _bar(shown=use_tqdm) as bar:
            task = bar.add_task("requests", total=len(listed), completed=sum(each.failed for each in progress.values()))
            for event in self._events():
                _note(progress[event.request_id], event)
                bar.advance(task, isinstance(event, FinishedEvent))
        return [self._output(its_progress) for its_progress in progress.values()]

    def close(self) -> None:
        """End the processes beside it that compile grammars. Nothing can be generated any more."""
        self._engine.close()

    def _submit(self, request_id: RequestId, progress: _Progress, sampling: SamplingParams) -> None:
        request = EngineRequest(
            request_id=request_id,
            attempt=1,
            prompt_ids=progress.prompt_ids,
            sampling=sampling,
            fidelity=self._fidelity,
            deadline=Deadline(math.inf),
        )
        try:
            self._engine.checks.check(request)
            self._engine.submit(request)
        except ServingError as error:
            progress.error = error

    def _events(self) -> Iterator[StepEvent]:
        """Everything that happens until all requests have ended."""
        while True:
            # Only grammars are waited for: what runs goes on while they are compiled.
            while not self._answers.empty() or (self._engine.compiling and not self._engine.runnable):
                self._engine.answer(self._answers.get())
            events = self._engine.step()
            yield from events
            if not (events or self._engine.runnable or self._engine.compiling):
                return

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        return (
            (self._config.bos_token_id, *self._tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
        )

    def _output(self, progress: _Progress) -> RequestOutput:
        detokenizer = Detokenizer(self._tokenizer)
        text = detokenizer.push([token.id for token in progress.tokens]) + detokenizer.finish()
        end = progress.end
        output = CompletionOutput(
            tokens=tuple(progress.tokens),
            text=text,
            finish_reason=FinishReason.ERROR if end is None else end.reason,
            matched_stop_id=None if end is None else end.matched_stop_id,
        )
        return RequestOutput(progress.prompt_ids, output, progress.error if end is None else end.error)


def _bar(*, shown: bool) -> Progress:
    return Progress(console=Console(stderr=True), disable=not shown)


def _note(progress: _Progress, event: StepEvent) -> None:
    match event:
        case TokensEvent():
            progress.tokens += event.tokens
        case FinishedEvent():
            progress.end = event
        case _:
            raise AssertionError("a request that generates hands nothing off")


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt is a list of one; a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]
