"""The offline interface: one rank in this process, no store, no thread. It is the oracle for the cluster.

from whalepod import LLM, SamplingParams
outputs = LLM(model_dir).generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from rich.console import Console

from whalepod.core.block_keys import chain_root, derive_block_hashes
from whalepod.core.clock import Deadline
from whalepod.core.errors import ConfigError, ServingError
from whalepod.core.ids import RequestId, mint_request_id
from whalepod.core.progress import ProgressReport
from whalepod.core.upstream_variables import SETTINGS, check_fidelity, upstream_values
from whalepod.model.config import ModelConfig
from whalepod.model.detokenizer import Detokenizer
from whalepod.model.prompt import PromptEncoder
from whalepod.model.vision.preparation import PlacedImage

from .bad_words import encode_bad_words
from .engine import Delivery, Engine
from .images import RequestImage, block_extras
from .inline_spans import inline_spans
from .interface import (
    EngineRequest,
    Fidelity,
    FinishedEvent,
    FinishReason,
    PromptTokensEvent,
    SampledToken,
    StepEvent,
    TokensEvent,
)
from .llm_outputs import Choice, RequestOutput, silent_ids
from .options import RankOptions
from .rank_model import RankModel
from .sampling_params import SamplingParams
from .speculation.options import Acceptance, DraftSampling, SpeculationOptions, Verification, speculation_for

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
"""{"role": …, "content": …}"""

SERVED_NAME = "model"
Kind = TypeVar("Kind", bound=Enum)


@dataclass(slots=True)
class _Asked:
    """One prompt and its choices."""

    prompt_ids: tuple[int, ...]
    choices: list[Choice]
    scores: list[SampledToken | None] | None
    """Of the prompt's tokens so far, if they were asked for."""

    def note_prompt(self, event: PromptTokensEvent) -> None:
        """The first choice that gets so far tells the scores for all."""
        if self.scores is not None and len(self.scores) == event.start:
            self.scores += event.tokens

    def output(self) -> RequestOutput:
        error = next((choice.error for choice in self.choices if choice.error is not None), None)
        scores = None if self.scores is None else tuple(self.scores)
        return RequestOutput(self.prompt_ids, tuple(choice.output() for choice in self.choices), error, scores)


class LLM:
    """A loaded model that answers batches of prompts. Not thread-safe."""

    def __init__(
        self,
        model: Path | str | None = None,
        *,
        block_tokens: int | None = None,
        fidelity: str | Fidelity | None = None,
        context_tokens_max: int | None = None,
        slots: int | None = None,
        blocks: int | None = None,
        chunk_tokens: int | None = None,
        async_scheduling: bool | None = None,
        draft_tokens: int | None = None,
        quantized_caches: bool = True,
        threads: int = 1,
        cpu_operators: bool = True,
        launch_table_file: Path | None = None,
        device: str | None = None,
        variables: Mapping[str, str] = os.environ,
    ) -> None:
        """Reads the weights in the directory `model` to `device` (`cpu`, `cuda`, `cuda:N`). What the model decides if
        None: `block_tokens`, `context_tokens_max`. What is not given is taken from `variables` of the published engine,
        as `docs/configuration.md` lists them: `model`, `device` (else cpu), `fidelity` (else exact), `slots` (else 16),
        `chunk_tokens` (else 512), `async_scheduling` (else on), `draft_tokens` (else as many as the model drafts; 0:
        none) and the rest of DSpark. Drafts change no token of greedy and seeded requests.

        Raises ConfigError or CheckpointError, ValueError on an unknown fidelity.
        """
        if fidelity is not None:
            check_fidelity(variables, fidelity=Fidelity(fidelity).value, set_by="fidelity")
        upstream = {key: text for key, _, text in upstream_values(variables)}
        directory = model or upstream.get("model")
        if directory is None:
            raise ConfigError("no model: name a checkpoint directory (model, DEEPINFER_HF_MODEL_DIR)")
        self._fidelity = Fidelity(fidelity or upstream.get("fidelity.default", Fidelity.EXACT))
        loaded = RankModel.load(
            directory,
            block_tokens=block_tokens,
            quantized_caches=quantized_caches,
            threads=threads,
            cpu_operators=cpu_operators,
            launch_table_file=launch_table_file,
            device=device or upstream.get("engine.device", "cpu"),
            kept_rows=_number(upstream, "engine.kept_rows"),
        )
        options = RankOptions(
            slots=slots or _number(upstream, "decode.slots") or 16,
            blocks=blocks,
            chunk_tokens=chunk_tokens or _number(upstream, "prefill.chunk_tokens") or 512,
            context_tokens_max=context_tokens_max,
            async_scheduling=_number(upstream, "engine.async_scheduling") != 0
            if async_scheduling is None
            else async_scheduling,
            speculation=_speculation(upstream, loaded.config, draft_tokens, Path(directory)),
        )
        self._tokenizer = loaded.tokenizer
        self._config = loaded.config
        self._answers: SimpleQueue[Delivery] = SimpleQueue()
        spans = inline_spans(directory, loaded)
        self._engine = Engine(loaded, options, store=None, deliver=self._answers.put, spans=spans)
        self._namespace = loaded.namespace
        self._block_tokens = loaded.block_tokens
        self._context_tokens = self._engine.memory.context_tokens_max

    @property
    def slots(self) -> int:
        """Requests that run at a time."""
        return self._engine.memory.slots

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """One output a prompt, in order. A prompt that fails does not lose the others.

        A text becomes the begin-of-sequence token and its tokens, none of which is special; a list of ids is taken as
        it is. `params`: for all prompts, or one for each. `priority`: one for each, smaller goes first. `use_tqdm`:
        show on stderr how many have ended. Raises ValueError if their numbers differ.
        """
        listed = [self._ids(prompt) for prompt in _listed(prompts)]
        return self._answer(listed, params, priority=priority, use_tqdm=use_tqdm)

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
            )
            for conversation in conversations
        ]
        return self.generate_with_images(
            [(prompt.prompt_ids, prompt.images) for prompt in prompts], params, use_tqdm=use_tqdm
        )

    def generate_with_images(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[PlacedImage]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """As `generate`, for prompts of ids and the images in them."""
        listed = [tuple(ids) for ids, _ in prompts]
        images = [tuple(map(RequestImage.of, placed)) for _, placed in prompts]
        return self._answer(listed, params, images=images, use_tqdm=use_tqdm)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self._tokenizer, self._config, served_names=(SERVED_NAME,))

    def _answer(
        self,
        listed: Sequence[tuple[int, ...]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        priority: Sequence[int] | None = None,
        images: Sequence[tuple[RequestImage, ...]] | None = None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(each)} sampling parameters")
        turns = [0] * len(listed) if priority is None else priority
        if len(turns) != len(listed):
            raise ValueError(f"{len(listed)} prompts, but {len(turns)} priorities")
        pictures = [()] * len(listed) if images is None else images
        asked = [self._ask(*one) for one in zip(listed, each, turns, pictures, strict=True)]
        choices = {choice.request_id: (choice, one) for one in asked for choice in one.choices}
        refused = sum(choice.ended for choice, _ in choices.values())
        with _report(len(choices), refused) if use_tqdm else nullcontext() as report:
            for event in self._events():
                choice, one = choices[event.request_id]
                if not choice.ended:
                    self._note(choice, one, event)
                    if report is not None and choice.ended:
                        report.advance()
            if report is not None:
                report.finish()
        return [one.output() for one in asked]

    def _note(self, choice: Choice, asked: _Asked, event: StepEvent) -> None:
        match event:
            case PromptTokensEvent():
                asked.note_prompt(event)
            case TokensEvent():
                choice.take(event.tokens)
                if choice.ended:
                    self._engine.cancel(choice.request_id, 1)
            case FinishedEvent():
                choice.end(event.reason, event.matched_stop_id, event.error)
            case _:
                raise AssertionError("a request that generates hands nothing off")

    def close(self) -> None:
        """End the processes beside it that compile grammars. Nothing can be generated any more."""
        self._engine.close()

    def _ask(
        self, prompt: tuple[int, ...], sampling: SamplingParams, priority: int, images: tuple[RequestImage, ...]
    ) -> _Asked:
        """Submit a request for each choice of a prompt. What is refused has ended."""
        choices = [self._new_choice(sampling) for _ in range(sampling.n)]
        request = EngineRequest(
            request_id=choices[0].request_id,
            attempt=1,
            prompt_ids=prompt,
            sampling=replace(sampling, n=1, stop=(), bad_words=()),
            fidelity=self._fidelity,
            deadline=Deadline(math.inf),
            priority=priority,
            images=images,
        )
        try:
            encoded = encode_bad_words(replace(sampling, n=1, stop=()), self._tokenizer.encode)
            request = replace(request, sampling=encoded)
            self._engine.checks.check(request)
            for branched in self._branches(request, [choice.request_id for choice in choices]):
                self._engine.submit(branched)
        except ServingError as error:
            for choice in choices:
                choice.end(FinishReason.ERROR, error=error)
        return _Asked(prompt, choices, None if sampling.prompt_logprobs is None else [None])

    def _branches(self, request: EngineRequest, request_ids: Sequence[RequestId]) -> Iterator[EngineRequest]:
        """The requests of all choices. Several share blocks, under names that no other request can know."""
        if len(request_ids) > 1:
            root = chain_root(self._namespace, salt=request.request_id)
            extras = block_extras(request.images, block_tokens=self._block_tokens)
            hashes = derive_block_hashes(request.prompt_ids, root=root, block_tokens=self._block_tokens, extras=extras)
            request = replace(request, chain_root=root, block_hashes=hashes)
        yield request
        for branch, request_id in enumerate(request_ids[1:], start=1):
            yield replace(request, request_id=request_id, branch=branch, branch_of=request.request_id)

    def _new_choice(self, sampling: SamplingParams) -> Choice:
        text = Detokenizer(
            self._tokenizer,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        return Choice(mint_request_id(), text, silent_ids(sampling, eos_id=self._config.eos_token_id))

    def _events(self) -> Iterator[StepEvent]:
        """Everything that happens until all requests have ended."""
        while True:
            # Only grammars and images are waited for: what runs goes on meanwhile.
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


def _number(upstream: Mapping[str, str], key: str) -> int | None:
    """Raises ConfigError."""
    text = upstream.get(key)
    try:
        return None if text is None else int(text)
    except ValueError:
        names = ", ".join(variable for variable, named in SETTINGS.items() if named == key)
        raise ConfigError(f"{names} must be a whole number, not {text!r}") from None


def _speculation(
    upstream: Mapping[str, str], model: ModelConfig, draft_tokens: int | None, directory: Path
) -> SpeculationOptions | None:
    """Raises ConfigError."""
    texts = {key.removeprefix("dspark."): text for key, text in upstream.items() if key.startswith("dspark.")}
    wanted = SpeculationOptions(
        verification=_one_of(Verification, texts, "verification", Verification.FIXED),
        acceptance=_one_of(Acceptance, texts, "acceptance", Acceptance.AUTO),
        draft_sampling=_one_of(DraftSampling, texts, "draft_sampling", DraftSampling.SAMPLE),
        lag_steps=_number(upstream, "dspark.budget_lag") or 2,
    )
    return speculation_for(
        model,
        wanted,
        draft_tokens=_number(upstream, "dspark.draft_tokens") if draft_tokens is None else draft_tokens,
        cost_table=Path(texts["cost_table"]) if "cost_table" in texts else None,
        temperature_table=Path(texts["temperature_table"]) if "temperature_table" in texts else None,
        directory=directory,
    )


def _one_of(kind: type[Kind], texts: Mapping[str, str], name: str, default: Kind) -> Kind:
    """Raises ConfigError."""
    try:
        return kind(texts[name]) if name in texts else default
    except ValueError:
        allowed = ", ".join(str(each.value) for each in kind)
        raise ConfigError(f"dspark.{name} must be one of {allowed}, not {texts[name]!r}") from None


def _report(requests: int, refused: int) -> ProgressReport:
    console = Console(stderr=True)
    report = ProgressReport("requests", unit="requests", total=requests, say=console.print, console=console)
    report.note(refused)
    return report


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt is a list of one; a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    ids = [prompt for prompt in prompts if isinstance(prompt, int)]
    if ids and len(ids) == len(prompts):
        return [ids]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]
