"""What is learnt is what is served: a document begins with the ids that the router makes of the same request."""

from __future__ import annotations

import asyncio
import json
import lzma
import random
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import deepseek_recipe as recipe
import pytest

from whalepod.model.config import ModelConfig
from whalepod.model.tiny_checkpoint import shipped_tokenizer, tiny_config_json
from whalepod.services.router.language import Language
from whalepod.training.corpus import runs_of_ones, shipped_renderer
from whalepod.training.data.documents import CONTEXT_TOKENS, SERVED_NAME, Document, assistant, chat, system, user
from whalepod.training.data.facts import fact_document
from whalepod.training.data.json_answers import invented_document, json_document
from whalepod.training.data.talk import talk_document
from whalepod.training.data.tools import tool_document

RENDERER, TOKENIZER = shipped_renderer()
EOS, ASSISTANT, THINK_END = 1, 5, 8
MAKERS: tuple[Callable[[random.Random], Document], ...] = (
    talk_document,
    fact_document,
    tool_document,
    json_document,
    invented_document,
)


def routed(bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The prompts' ids as the router's own `Language` makes them."""

    async def run() -> list[list[int]]:
        tokenizer = shipped_tokenizer()
        language = Language(tokenizer, ModelConfig.from_json(tiny_config_json(tokenizer)), served_name=SERVED_NAME)
        try:
            prompts = [await language.chat_prompt(body, context_tokens=CONTEXT_TOKENS, chars=100) for body in bodies]
            return [list(prompt.prompt_ids) for prompt in prompts]
        finally:
            language.close()

    return asyncio.run(run())


def drawn(maker: Callable[[random.Random], Document], count: int) -> list[Document]:
    draw = random.Random(5)
    return [maker(draw) for _ in range(count)]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_a_document_begins_as_the_router_renders_its_request_and_ends_once(
    maker: Callable[[random.Random], Document],
) -> None:
    documents = drawn(maker, 30)
    prompts = routed([dict(document.body) for document in documents])
    for document, prompt in zip(documents, prompts, strict=True):
        rendered = RENDERER.render(document)
        ids = list(rendered.ids)
        assert ids[: rendered.prompt] == prompt
        said = ids[rendered.prompt :]
        assert said[-1] == EOS
        assert EOS not in said[:-1]
        assert list(rendered.targets[rendered.prompt :]) == [1] * len(said)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_the_served_parser_reads_the_answer_back(maker: Callable[[random.Random], Document]) -> None:
    for document in drawn(maker, 20):
        rendered = RENDERER.render(document)
        message = parsed(document, list(rendered.ids[rendered.prompt : -1]))
        assert message["content"] == document.answer
        assert (message.get("reasoning_content") or None) == (document.reasoning or None)
        if document.kind == "json":
            json.loads(message["content"])


def parsed(document: Document, said: list[int]) -> dict[str, Any]:
    prompt = RENDERER.prompt(document.body)
    parser = prompt.parser(response_id="r", model=SERVED_NAME)
    response = recipe.ChatCompletionResponse("r", SERVED_NAME, 0, len(prompt.prompt_ids), 0)
    usage = recipe.PromptUsage(prompt_tokens=len(prompt.prompt_ids), prompt_cache_hit_tokens=0)
    chunks = list(parser.push(recipe.InferenceChunk.ready(prompt_usage=usage)))
    chunks += parser.push(recipe.InferenceChunk.tokens(said))
    chunks += parser.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    for chunk in [*chunks, *parser.finish()]:
        assert isinstance(chunk, recipe.ChatCompletionChunk)
        response.accumulate(chunk)
    return json.loads(response.to_json())["choices"][0]["message"]


def test_a_call_within_a_document_stands_where_its_request_would_be_answered() -> None:
    """Cut before the call, the document is the prompt that a client sends; what follows is learnt and is the call."""
    checked = 0
    for document in drawn(tool_document, 30):
        messages = document.body["messages"]
        rendered = RENDERER.render(document)
        for i, message in enumerate(messages):
            if "tool_calls" in message:
                prompt = RENDERER.prompt_ids({**document.body, "messages": messages[:i]})
                ids = list(rendered.ids)
                assert ids[: len(prompt)] == prompt
                end = ids.index(EOS, len(prompt))
                assert all(rendered.targets[len(prompt) : end + 1])
                before = Document("tool", "", body={**document.body, "messages": messages[:i]})
                (call,) = parsed(before, ids[len(prompt) : end])["tool_calls"]
                wanted = message["tool_calls"][0]["function"]
                assert call["function"]["name"] == wanted["name"]
                assert json.loads(call["function"]["arguments"]) == json.loads(wanted["arguments"])
                checked += 1
    assert checked > 20


def test_only_what_the_assistant_says_is_learnt() -> None:
    turns = [system("Be kind."), user("Hi"), assistant("Hello!"), user("Bye")]
    rendered = RENDERER.render(chat("chat", "", turns, "See you."))
    learnt = [token for token, target in zip(rendered.ids, rendered.targets, strict=True) if target]
    assert (
        TOKENIZER.file.decode(learnt, skip_special_tokens=False)
        == "Hello!<｜end▁of▁sentence｜>See you.<｜end▁of▁sentence｜>"
    )


def test_with_thinking_the_reasoning_comes_first_and_earlier_turns_are_context() -> None:
    turns = [user("Hi"), assistant("Hello!"), user("Bye")]
    rendered = RENDERER.render(chat("chat_thinking", "", turns, "See you.", reasoning="They leave."))
    learnt = [token for token, target in zip(rendered.ids, rendered.targets, strict=True) if target]
    assert (
        TOKENIZER.file.decode(learnt, skip_special_tokens=False) == "They leave.</think>See you.<｜end▁of▁sentence｜>"
    )
    assert learnt.count(THINK_END) == 1


def test_a_text_alone_is_a_completion_from_its_beginning() -> None:
    rendered = RENDERER.render(Document("story", "", text="Tim was a fox."))
    assert list(rendered.ids) == [0, *TOKENIZER.encode("Tim was a fox."), EOS]
    assert list(rendered.targets) == [0, *[1] * (len(rendered.ids) - 1)]


def test_a_text_that_spells_special_tokens_makes_none() -> None:
    said = "a <｜User｜> b</think>"
    rendered = RENDERER.render(chat("chat", "", [user(said)], said))
    assert list(rendered.ids).count(THINK_END) == 1, "the format's own"
    assert ASSISTANT in rendered.ids
    assert list(rendered.ids).count(4) == 1


def test_the_held_out_sample_that_ships_is_rendered_as_it_is_served_now() -> None:
    packed = resources.files("whalepod").joinpath("models", SERVED_NAME, "heldout.jsonl.xz").read_bytes()
    rows = [json.loads(line) for line in lzma.decompress(packed).decode().splitlines()]
    assert {row["kind"] for row in rows} == {"story", "chat", "chat_thinking", "tool", "json", "recall"}
    for row in rows:
        if "body" in row:
            document = Document(row["kind"], "", body=row["body"], answer=row["answer"], reasoning=row["reasoning"])
        else:
            document = Document(row["kind"], "", text=TOKENIZER.file.decode(row["ids"]))
        rendered = RENDERER.render(document)
        assert list(rendered.ids) == row["ids"]
        assert [list(run) for run in runs_of_ones(rendered.targets)] == row["targets"]
