"""A document of the corpus, and its token ids exactly as the serving path makes them.

Chats go through `model/prompt.py`, which renders every request that is served: a document's ids are the prompt of its
last turn, then that turn's answer as a rank would say it, then the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepseek_recipe import SpecialToken

from whalepod.core.errors import CheckpointError
from whalepod.model.config import ModelConfig
from whalepod.model.prompt import ChatPrompt, PromptEncoder
from whalepod.model.special_tokens import recipe_special_tokens
from whalepod.model.tokenizer import Tokenizer

KINDS = ("story", "chat", "chat_thinking", "tool", "json", "recall", "text")
CONTEXT_TOKENS = 16_384
SERVED_NAME = "whalepod-tiny"


@dataclass(frozen=True, slots=True)
class Document:
    """Either `text`, or a `body` (a request's fields without its last turn) with the `answer` and its `reasoning`.

    Documents of one `group` are all held out or none is.
    """

    kind: str
    group: str
    text: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    answer: str = ""
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """`targets[i]` is 1 where id i is what a model must learn to say; the first `prompt` ids come from the client."""

    ids: Sequence[int]
    targets: Sequence[int]
    prompt: int


def chat(
    kind: str,
    group: str,
    messages: Sequence[Mapping[str, Any]],
    answer: str,
    *,
    reasoning: str | None = None,
    **fields: Any,  # noqa: ANN401 - of a request's body
) -> Document:
    """A conversation. With `reasoning`, even an empty one, the request asks for thinking."""
    thinking = {"type": "disabled" if reasoning is None else "enabled"}
    body = {"messages": list(messages), "thinking": thinking, **fields}
    return Document(kind, group, body=body, answer=answer, reasoning=reasoning)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


class Renderer:
    """Documents to ids, for the tokenizer that ships and a configuration with its special ids."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, config, served_names=[SERVED_NAME])
        self._eos = config.eos_token_id
        spellings = recipe_special_tokens()
        self._assistant = self._id(spellings.token(SpecialToken.Assistant))
        self._think_start = self._id(spellings.token(SpecialToken.ThinkingStart))
        self._think_end = self._id(spellings.token(SpecialToken.ThinkingEnd))

    def render(self, document: Document) -> Rendered:
        if document.text is not None:
            ids = self._encoder.completion(document.text, context_tokens=CONTEXT_TOKENS)
            return Rendered([*ids, self._eos], [0, *[1] * len(ids)], 1)
        prompt = self.prompt_ids(document.body)
        said = self._tokenizer.encode(document.answer)
        if document.reasoning is not None:
            said = [*self._tokenizer.encode(document.reasoning), self._think_end, *said]
        targets = [*self._said_before(prompt, document), *[1] * (len(said) + 1)]
        return Rendered([*prompt, *said, self._eos], targets, len(prompt))

    def prompt(self, body: Mapping[str, Any]) -> ChatPrompt:
        """What the router makes of a request."""
        return self._encoder.chat(body, context_tokens=CONTEXT_TOKENS)

    def prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Its ids."""
        return list(self.prompt(body).prompt_ids)

    def _said_before(self, prompt: Sequence[int], document: Document) -> list[int]:
        """1 for what the assistant said in earlier turns, where it stands as it was said."""
        targets = [0] * len(prompt)
        if document.reasoning is not None and not document.body.get("tools"):
            return targets  # the format drops earlier reasoning
        inside = False
        for i, token in enumerate(prompt):
            if inside and prompt[i - 1] != self._assistant:
                targets[i] = 1
            if token == self._assistant:
                inside = True
            elif token == self._eos:
                inside = False
        if inside:  # the last turn's opening is the client's
            targets[-1] = 0
        return targets

    def _id(self, spelling: str) -> int:
        token_id = self._tokenizer.token_id(spelling)
        if token_id is None:
            raise CheckpointError(f"tokenizer.json lacks the special token {spelling}")
        return token_id
