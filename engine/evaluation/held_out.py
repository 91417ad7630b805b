"""Text and conversations that no training step saw, from a compressed file of JSON lines.

    {"kind": "story", "ids": [0, 84, …], "targets": [[1, 140]]}
    {"kind": "tool", "ids": …, "targets": …, "body": {"messages": […], "tools": […]}, "answer": "…"}

`ids` are scored where `targets` say so: runs [start, end) of tokens that the model is to say. A `body` is one of
`/v1/chat/completions`, to which `answer` is right. A conversation is a question too: of kind `recall` about facts in
its first message, one in each turn; of kind `json` for an object that follows a schema; of kind `tool` for the last
call in it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from whalepod.core.errors import ConfigError
from whalepod.model.config import ModelConfig
from whalepod.model.tokenizer import Tokenizer

HELD_OUT_FILE: Final = "heldout.jsonl.xz"
"""In the model's directory, and in that of its training data."""
SERVED_NAME: Final = "whalepod-tiny"
DISTANCES: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Facts are counted by the first of these that is no less than the tokens between them and the question."""


@dataclass(frozen=True, slots=True)
class Document:
    kind: str
    ids: Sequence[int]
    places: Sequence[int]
    """Of the tokens that are scored, ascending; the others are given."""
    text_bytes: int
    """Of UTF-8 that the scored tokens spell, special ones left out."""


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    body: Mapping[str, Any]
    answer: str = ""
    """What is right, if there is one right answer."""
    distance: int | None = None
    """Of a question about a fact: one of DISTANCES."""
    calls: Sequence[Mapping[str, Any]] = ()
    """Of a question that needs tools: the calls that are right."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    documents: Sequence[Document]
    questions: Sequence[Question]
    sha256: str
    """Of the file, as hex."""

    @classmethod
    def read(cls, path: Path, tokenizer: Tokenizer, config: ModelConfig) -> Self:
        """Raises ConfigError, naming the line, if it is no such file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        reader = _Reader(tokenizer, config)
        documents: list[Document] = []
        questions: list[Question] = []
        for number, line in enumerate(_lines(data, path), start=1):
            try:
                entry: Mapping[str, Any] = json.loads(line)
                documents.append(reader.document(entry))
                questions += reader.questions(entry)
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path}, line {number}: {type(error).__name__} {error}") from None
        return cls(documents, questions, hashlib.sha256(data).hexdigest())

    def of_kind(self, kind: str) -> list[Question]:
        return [question for question in self.questions if question.kind == kind]


class _Reader:
    def __init__(self, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._tokens = min(tokenizer.ids_end, config.vocab_size)
        self._context = config.max_position_embeddings

    def document(self, entry: Mapping[str, Any]) -> Document:
        ids = [int(token) for token in entry["ids"]]
        if not ids or min(ids) < 0 or max(ids) >= self._tokens or len(ids) >= self._context:
            raise ValueError(f"ids must be tokens of this model, below {self._tokens}, and fit its context")
        places = [place for start, end in entry["targets"] for place in range(start, end)]
        if not places or places[0] < 1 or places[-1] >= len(ids):
            raise ValueError("targets must be runs of ids that follow others")
        spoken = (ids[place] for place in places if ids[place] not in self._tokenizer.special_ids)
        return Document(entry["kind"], ids, places, sum(len(self._tokenizer.token_bytes(token)) for token in spoken))

    def questions(self, entry: Mapping[str, Any]) -> list[Question]:
        if entry.get("body") is None:
            return []
        kind, body, answer = entry["kind"], entry["body"], entry["answer"]
        if kind == "recall":
            return [*self._recalls(body, answer)]
        if kind == "tool":
            return _call_question(body)
        if kind == "json" and _schema(body) is None:
            return []
        return [Question(kind, body, answer)]

    def _recalls(self, body: Mapping[str, Any], answer: str) -> Iterator[Question]:
        """One for each turn that asks for something which the first message tells in the answer's words."""
        messages = [*body["messages"], {"role": "assistant", "content": answer}]
        for place in range(1, len(messages), 2):
            asked, said = messages[:place], messages[place]["content"]
            distance = self._distance(asked, said)
            if distance is not None:
                yield Question("recall", {**body, "messages": asked}, said, distance=distance)

    def _distance(self, messages: Sequence[Mapping[str, Any]], answer: str) -> int | None:
        """Between the fact and the end of the conversation."""
        first, *later = (message["content"] for message in messages)
        place = first.casefold().rfind(answer.casefold().rstrip("."))
        if place < 0:
            return None
        tokens = len(self._tokenizer.encode("\n".join([first[place:], *later])))
        return next((distance for distance in DISTANCES if tokens <= distance), None)


def _lines(data: bytes, path: Path) -> list[bytes]:
    try:
        return lzma.decompress(data).splitlines()
    except lzma.LZMAError as error:
        raise ConfigError(f"{path} is not compressed by xz: {error}") from None


def _call_question(body: Mapping[str, Any]) -> list[Question]:
    """The conversation up to its last call."""
    messages = body["messages"]
    places = [place for place, message in enumerate(messages) if message.get("tool_calls")]
    if not places:
        return []
    asked = {**body, "messages": messages[: places[-1]]}
    calls = [call["function"] for call in messages[places[-1]]["tool_calls"]]
    return [Question("tool", asked, calls=calls)]


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    match body.get("response_format"):
        case {"json_schema": {"schema": schema}}:
            return schema
        case _:
            return None


def schema_of(question: Question) -> Mapping[str, Any]:
    """What a JSON answer must follow."""
    schema = _schema(question.body)
    assert schema is not None, "only questions with a schema are asked"
    return schema
