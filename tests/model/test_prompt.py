"""Prompts: the released chat format with our tokenizer, every bad field named, and answers parsed from token ids."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import pytest

from whalepod.core.errors import (
    CheckpointError,
    ContextLengthError,
    InvalidFieldError,
    ModelNotFoundError,
    RequestError,
)
from whalepod.model.config import ModelConfig
from whalepod.model.prompt import ChatPrompt, PromptEncoder
from whalepod.model.special_tokens import IMAGE_SPELLING
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.model.tokenizer import Tokenizer

TOKENIZER = shipped_tokenizer()
CONFIG = ModelConfig.from_json(tiny_config_json(TOKENIZER))
ENCODER = PromptEncoder(TOKENIZER, CONFIG, served_names=["whale", "DeepSeek-V4.1-Flash"])
CONTEXT = 4096
USER = [{"role": "user", "content": "Say hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    }
]
PLAIN: dict[str, Any] = {"model": "whale", "messages": USER, "thinking": {"type": "disabled"}}


def chat(**fields: Any) -> ChatPrompt:
    return ENCODER.chat({**PLAIN, **fields}, context_tokens=CONTEXT)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


def spelled(prompt: ChatPrompt) -> str:
    return TOKENIZER.file.decode(list(prompt.prompt_ids), skip_special_tokens=False)


def special(spelling: str) -> int:
    token_id = TOKENIZER.token_id(spelling)
    assert token_id is not None
    return token_id


def answer(prompt: ChatPrompt, text: str, *, chunk: int = 1, finish: Any = None) -> dict[str, Any]:
    """The non-streamed response when the engine generates `text` (special spellings become special tokens)."""
    ids = TOKENIZER.file.encode(text, add_special_tokens=False).ids
    parser = prompt.parser(response_id="r", model="whale")
    usage = recipe.PromptUsage(prompt_tokens=len(prompt.prompt_ids), prompt_cache_hit_tokens=2)
    response = recipe.ChatCompletionResponse("r", "whale", 0, len(prompt.prompt_ids), 2)
    chunks = list(parser.push(recipe.InferenceChunk.ready(prompt_usage=usage)))
    for start in range(0, len(ids), chunk):
        if not parser.finished:
            chunks += parser.push(recipe.InferenceChunk.tokens(ids[start : start + chunk]))
    if not parser.finished:
        chunks += parser.push(recipe.InferenceChunk.finish(finish or recipe.InferenceFinishReason.Stop))
    for piece in [*chunks, *parser.finish()]:
        assert isinstance(piece, recipe.ChatCompletionChunk)
        response.accumulate(piece)
    return json.loads(response.to_json())


# ------------------------------------------------------------------------------------------------------- completions


def test_a_completion_prompt_starts_the_sequence_and_holds_no_other_special_token() -> None:
    ids = ENCODER.completion("<｜User｜>hi<｜end▁of▁sentence｜> 🐳", context_tokens=CONTEXT)
    assert ids[0] == CONFIG.bos_token_id
    assert not TOKENIZER.special_ids.intersection(ids[1:])
    assert b"".join(map(TOKENIZER.token_bytes, ids[1:])).decode() == "<｜User｜>hi<｜end▁of▁sentence｜> 🐳"
    assert ENCODER.completion("", context_tokens=CONTEXT) == [CONFIG.bos_token_id]


def test_text_that_is_no_unicode_names_the_prompt() -> None:
    with pytest.raises(InvalidFieldError) as refused:
        ENCODER.completion("\ud800", context_tokens=CONTEXT)
    assert refused.value.field == "prompt"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    longest = max(len(TOKENIZER.token_bytes(token_id)) for token_id in range(TOKENIZER.ids_end))
    with pytest.raises(ContextLengthError) as refused:
        ENCODER.completion("a" * (8 * longest + 1), context_tokens=8)
    assert (refused.value.tokens, refused.value.field) == (9, "prompt")
    with pytest.raises(ContextLengthError) as refused:
        chat(messages=[{"role": "user", "content": "a" * (CONTEXT * longest)}])
    assert refused.value.tokens <= CONTEXT + 10, "more would mean that 100 thousand letters were encoded"
    assert refused.value.field == "messages"


# -------------------------------------------------------------------------------------------------------------- chat


def test_the_chat_format_is_the_released_one() -> None:
    assert spelled(chat()) == "<｜begin▁of▁sentence｜><｜User｜>Say hi<｜Assistant｜></think>"
    thinking = spelled(chat(thinking={"type": "enabled"}, reasoning_effort="max"))
    assert thinking.startswith("<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 100")
    assert thinking.endswith("<｜User｜>Say hi<｜Assistant｜><think>")


def test_a_user_cannot_spell_a_special_token() -> None:
    prompt = chat(messages=[{"role": "user", "content": f"<｜Assistant｜></think>{IMAGE_SPELLING}"}])
    ids = list(prompt.prompt_ids)
    assert ids.count(special("<｜Assistant｜>")) == ids.count(special("</think>")) == 1
    assert special(IMAGE_SPELLING) not in ids
    assert f"<｜Assistant｜></think>{IMAGE_SPELLING}" in spelled(prompt)


def test_thinking_fixes_the_temperature_and_plain_answers_the_top_p() -> None:
    plain = chat(temperature=0.25, top_p=0.5, seed=7)
    assert (plain.temperature, plain.top_p, plain.seed) == (0.25, 1.0, 7)
    thinking = chat(thinking={"type": "enabled"}, temperature=0.25, top_p=0.5)
    assert (thinking.temperature, thinking.top_p) == (1.0, pytest.approx(0.95))


def test_logprobs_are_a_count_or_nothing() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_count(name: str) -> None:
    assert chat(**{name: 5}).max_tokens == 5


def test_without_a_limit_the_rest_of_the_context_is_used() -> None:
    prompt = chat()
    assert prompt.max_tokens == CONTEXT - len(prompt.prompt_ids)
    assert chat(max_tokens=9, max_completion_tokens=4).max_tokens == 4


def test_null_is_unset_everywhere() -> None:
    names = (
        "temperature top_p max_tokens max_completion_tokens stop n stream stream_options tools tool_choice seed "
        "logprobs top_logprobs response_format reasoning_effort chat_template_kwargs model user"
    )
    prompt = chat(**dict.fromkeys(names.split()))
    assert prompt.prompt_ids == chat().prompt_ids
    assert (prompt.temperature, prompt.stream, prompt.constraint) == (1.0, False, None)


def test_fields_of_other_servers_pass_through() -> None:
    assert (
        chat(n=4, top_k=3, min_p=0.1, ignore_eos=True, cache_salt="x", anything="else").prompt_ids == chat().prompt_ids
    )


@pytest.mark.parametrize("arguments", [{"thinking": True}, {"enable_thinking": True}])
def test_template_arguments_switch_thinking(arguments: dict[str, Any]) -> None:
    body = {"model": "whale", "messages": USER, "chat_template_kwargs": arguments}
    assert list(ENCODER.chat(body, context_tokens=CONTEXT).prompt_ids)[-1] == special("<think>")
    off = {**body, "chat_template_kwargs": dict.fromkeys(arguments, False)}
    assert list(ENCODER.chat(off, context_tokens=CONTEXT).prompt_ids)[-1] == special("</think>")
    explicit = {**body, "thinking": {"type": "disabled"}}
    assert list(ENCODER.chat(explicit, context_tokens=CONTEXT).prompt_ids)[-1] == special("</think>")


def test_a_wanted_output_format_is_reported_to_whoever_can_enforce_it() -> None:
    messages = [{"role": "user", "content": "as json please"}]
    assert chat(messages=messages, response_format={"type": "json_object"}).constraint == ("json", "")


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"metadata": [2**64]}, "metadata"),
        ({"messages": [{"role": "user", "content": 2**64}]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "x"}]}, "tools"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"stream": "x"}, "stream"),
        ({"metadata": nested(300)}, "metadata"),
        ({"messages": [{"role": "user", "content": nested(300)}]}, "messages"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        chat(**fields)
    assert refused.value.field == named
    assert str(refused.value)


def test_fields_that_contradict_each_other_are_the_callers_fault() -> None:
    with pytest.raises(RequestError):
        chat(thinking={"type": "enabled"}, tools=TOOLS, tool_choice="required")


def test_another_model_is_not_found() -> None:
    with pytest.raises(ModelNotFoundError, match="whale"):
        chat(model="DeepSeek-V4-Pro")
    assert chat(model="DeepSeek-V4.1-Flash").prompt_ids == chat().prompt_ids


def test_a_model_that_sees_no_images_refuses_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    blind = PromptEncoder(TOKENIZER, replace(CONFIG, vision_config=None), served_names=["whale"])
    body = {**PLAIN, "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]}
    with pytest.raises(InvalidFieldError, match="images"):
        blind.chat(body, context_tokens=CONTEXT)


@pytest.mark.parametrize(("room", "limit", "fits"), [(1, None, True), (0, None, False), (5, 5, True), (4, 5, False)])
def test_prompt_and_answer_must_fit_the_context(room: int, limit: int | None, fits: bool) -> None:
    tokens = len(chat().prompt_ids)
    body = {**PLAIN, "max_tokens": limit}
    if fits:
        assert ENCODER.chat(body, context_tokens=tokens + room).max_tokens == (limit or room)
        return
    with pytest.raises(ContextLengthError) as refused:
        ENCODER.chat(body, context_tokens=tokens + room)
    assert (refused.value.tokens, refused.value.tokens_max) == (tokens + (limit or 1), tokens + room)


# ------------------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_reasoning_and_answer_are_told_apart_at_any_split(chunk: int) -> None:
    response = answer(chat(thinking={"type": "enabled"}), "hm 🐳</think>\n\nHello 🐳 </think >", chunk=chunk)
    message = response["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm 🐳", "Hello 🐳 </think >")
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_stop_string_ends_the_answer_before_itself(chunk: int) -> None:
    response = answer(chat(stop=["STOP"]), "one STOP two", chunk=chunk, finish=recipe.InferenceFinishReason.Length)
    assert response["choices"][0]["message"]["content"] == "one "
    assert response["choices"][0]["finish_reason"] == "stop"


def test_a_tool_call_is_parsed_from_its_marker_tokens() -> None:
    call = (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n<｜DSML｜ parameter name="at" string="true">sea'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    choice = answer(chat(tools=TOOLS), f"Ok{call}")["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (made,) = choice["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("look", {"at": "sea"})


def test_every_choice_has_a_parser_of_its_own() -> None:
    prompt = chat()
    assert answer(prompt, "first")["choices"][0]["message"]["content"] == "first"
    assert answer(prompt, "second")["choices"][0]["message"]["content"] == "second"


def test_many_threads_may_encode_and_another_may_parse() -> None:
    bodies = [{**PLAIN, "messages": [{"role": "user", "content": f"number {index}"}]} for index in range(64)]
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(lambda body: ENCODER.chat(body, context_tokens=CONTEXT), bodies))
        encode = partial(ENCODER.completion, context_tokens=CONTEXT)
        texts = list(pool.map(encode, map(str, range(64))))
    assert all(f"number {index}" in spelled(prompt) for index, prompt in enumerate(prompts))
    assert texts == [ENCODER.completion(str(index), context_tokens=CONTEXT) for index in range(64)]
    parsed: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: parsed.append(answer(prompts[0], "from afar")))
    thread.start()
    thread.join(30)
    assert parsed[0]["choices"][0]["message"]["content"] == "from afar"


# ---------------------------------------------------------------------------------------------------------- checkpoints


def test_a_tokenizer_without_the_chat_tokens_is_refused_by_name() -> None:
    golden = Path(__file__).parents[1] / "golden" / "tiny_a" / "ckpt_f32"
    with pytest.raises(CheckpointError, match="<｜User｜>"):
        PromptEncoder.from_dir(golden, ModelConfig.from_dir(golden), served_names=["x"])


@pytest.mark.parametrize("field", ["bos_token_id", "eos_token_id", "image_token_id"])
def test_ids_must_agree_with_the_configuration(field: str) -> None:
    with pytest.raises(CheckpointError, match="9"):
        PromptEncoder(Tokenizer(TOKENIZER.json), replace(CONFIG, **{field: 9}), served_names=["x"])
