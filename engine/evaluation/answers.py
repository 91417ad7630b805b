"""Whether answers are right: facts that stand far back are recalled, JSON follows its schema, tools are called.

    question ──PromptEncoder──▶ prompt ──▶ engine, temperature 0 ──▶ tokens ──released parser──▶ message ──▶ right?

Prompts are encoded and answers are parsed as the router does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe
import jsonschema

from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.grammar.tool_calls import tool_calls_source
from whalepod.engine.interface import Fidelity, FinishReason
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.prompt import ChatPrompt, PromptEncoder
from whalepod.model.special_tokens import recipe_special_tokens

from .held_out import SERVED_NAME, Question, schema_of
from .measured_engine import Answered, Asked, MeasuredEngine, Note


@dataclass(frozen=True, slots=True)
class AnswerWay:
    """How questions are answered."""

    reuse: bool = False
    """Every prompt was seen before: it starts from stored blocks."""
    every_row: bool = False
    """Mode `off`."""
    guided: bool = False
    """The format that the question asks for is enforced token by token."""
    fidelity: Fidelity = Fidelity.FAST
    answer_tokens: int = 256
    """Longest answer."""


@dataclass(frozen=True, slots=True)
class Given:
    """The answer to one question."""

    question: Question
    message: Mapping[str, Any]
    """As in a response of the HTTP API."""
    valid: bool
    """It ended by itself and has the form that was asked for."""
    right: bool
    """It is valid, and says what it should."""
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """Of some answers."""

    valid: int
    right: int
    asked: int
    found: int
    """Whose prompts began with stored blocks."""

    @classmethod
    def of(cls, given: Sequence[Given]) -> Share:
        return cls(
            valid=sum(one.valid for one in given),
            right=sum(one.right for one in given),
            asked=len(given),
            found=sum(one.cached_tokens > 0 for one in given),
        )


def encoder_of(model: RankModel) -> PromptEncoder:
    return PromptEncoder(model.tokenizer, model.config, served_names=(SERVED_NAME,))


def answer_questions(
    model: RankModel, questions: Sequence[Question], way: AnswerWay, *, note: Note | None = None
) -> list[Given]:
    """Greedy answers, in order. With `reuse`, each prompt is computed once before, so that it is found again."""
    if not questions:
        return []
    encoder = encoder_of(model)
    context = model.config.max_position_embeddings
    prompts = [encoder.chat(each.body, context_tokens=context) for each in questions]
    think_end = model.tokenizer.token_id(recipe_special_tokens().token(recipe.SpecialToken.ThinkingEnd))
    asked = [_asked(prompt, way, think_end=think_end) for prompt in prompts]
    engine = MeasuredEngine(
        model,
        context_tokens=max(len(one.prompt_ids) for one in asked) + way.answer_tokens,
        reuse=way.reuse,
        stored_tokens=sum(len(one.prompt_ids) for one in asked) if way.reuse else 0,
    )
    try:
        if way.reuse:
            once = SamplingParams(temperature=0, max_tokens=1)
            engine.run([Asked(one.prompt_ids, once, fidelity=way.fidelity) for one in asked])
        answers = engine.run(asked, note=note)
    finally:
        engine.close()
    eos = model.config.eos_token_id
    return [
        judged(question, prompt, [token for token in answer.ids if token != eos], answer)
        for question, prompt, answer in zip(questions, prompts, answers, strict=True)
    ]


def judged(question: Question, prompt: ChatPrompt, spoken: Sequence[int], answer: Answered) -> Given:
    """`spoken`: the answer's tokens without the one that ended it."""
    finished = answer.reason is FinishReason.STOP
    message = parsed_message(prompt, spoken, finished=finished)
    valid, right = _JUDGES[question.kind](question, message) if finished else (False, False)
    return Given(question, message, valid, valid and right, answer.cached_tokens)


def recall_by_distance(given: Sequence[Given]) -> dict[int, Share]:
    """Of questions about a fact, by the tokens between it and the question, ascending."""
    distances = sorted({one.question.distance for one in given if one.question.distance is not None})
    return {d: Share.of([one for one in given if one.question.distance == d]) for d in distances}


def parsed_message(prompt: ChatPrompt, ids: Sequence[int], *, finished: bool) -> dict[str, Any]:
    """The message that the router would send for these tokens, without the one that ends the sequence; of an answer
    that cannot be parsed, an empty one."""
    parser = prompt.parser(response_id="answer", model=SERVED_NAME)
    response = recipe.ChatCompletionResponse("answer", SERVED_NAME, 0, len(prompt.prompt_ids), 0)
    usage = recipe.PromptUsage(prompt_tokens=len(prompt.prompt_ids), prompt_cache_hit_tokens=0)
    reason = recipe.InferenceFinishReason.Stop if finished else recipe.InferenceFinishReason.Length
    try:
        chunks = list(parser.push(recipe.InferenceChunk.ready(prompt_usage=usage)))
        chunks += parser.push(recipe.InferenceChunk.tokens(list(ids)))
        if not parser.finished:
            chunks += parser.push(recipe.InferenceChunk.finish(reason))
        for chunk in [*chunks, *parser.finish()]:
            assert isinstance(chunk, recipe.ChatCompletionChunk), "a chat request is answered in its own protocol"
            response.accumulate(chunk)
    except RuntimeError:
        return {}
    finally:
        parser.close()
    return json.loads(response.to_json())["choices"][0]["message"]


def _asked(prompt: ChatPrompt, way: AnswerWay, *, think_end: int | None) -> Asked:
    grammar = _grammar(prompt.constraint) if way.guided else None
    sampling = SamplingParams(
        temperature=0,
        max_tokens=min(way.answer_tokens, prompt.max_tokens),
        prompt_logprobs=0 if way.every_row else None,
        grammar=grammar,
        grammar_starts_after=think_end if grammar is not None and prompt.reasons_first else None,
    )
    return Asked(prompt.prompt_ids, sampling, fidelity=way.fidelity)


def _grammar(constraint: tuple[str, str] | None) -> GrammarSpec | None:
    match constraint:
        case ("json", ""):
            return GrammarSpec.create(GrammarKind.JSON_OBJECT)
        case ("json", schema):
            return GrammarSpec.create(GrammarKind.JSON_SCHEMA, schema)
        case ("tool_call" | "tool_call_required" as kind, tools):
            source = tool_calls_source(json.loads(tools), opened=kind == "tool_call_required")
            return GrammarSpec.create(GrammarKind.TOOL_CALLS, source)
        case _:
            return None


def _said(question: Question, message: Mapping[str, Any]) -> tuple[bool, bool]:
    content = (message.get("content") or "").strip()
    return bool(content), content.casefold() == question.answer.strip().casefold()


def _json_given(question: Question, message: Mapping[str, Any]) -> tuple[bool, bool]:
    try:
        value = json.loads(message.get("content") or "")
        jsonschema.validate(value, schema_of(question))
    except (ValueError, jsonschema.ValidationError):
        return False, False
    return True, value == json.loads(question.answer)


def _tools_called(question: Question, message: Mapping[str, Any]) -> tuple[bool, bool]:
    """Valid: at least one call, all of tools that there are, with arguments that their schemas allow."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in question.body["tools"]}
    called: list[tuple[str, Any]] = []
    try:
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, schemas[name])
            called.append((name, arguments))
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False, False
    return bool(called), called == [(call["name"], json.loads(call["arguments"])) for call in question.calls]


_JUDGES: Mapping[str, Callable[[Question, Mapping[str, Any]], tuple[bool, bool]]] = {
    "recall": _said,
    "json": _json_given,
    "tool": _tools_called,
}
"""By kind of question: whether an answer is valid, and whether it is right if it is."""
