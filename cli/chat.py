"""`whalepod chat`: talk to a running cluster."""

from __future__ import annotations

import base64
import mimetypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from whalepod.core.errors import ServingError

from .event_stream import Server, stream_chunks

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option("--url", envvar="WHALEPOD_URL", help="Where the router listens.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="WHALEPOD_API_KEY", help="Best given by the variable.")]
CaFile = Annotated[Path | None, typer.Option("--ca-file", help="Authorities of the router's certificate, PEM.")]


def chat(
    message: Annotated[str | None, typer.Argument(help="Say this and leave; without it, ask line by line.")] = None,
    url: Url = DEFAULT_URL,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="Without thinking: 0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="The same seed draws the same answer.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = False,
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="Show this picture with the first question; may be repeated.")
    ] = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
) -> None:
    """Talk to the model. Ctrl-D or an empty line ends the conversation."""
    console = Console(highlight=False, soft_wrap=True)
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "thinking": {"type": "enabled" if thinking else "disabled"},
    }
    server = Server(url, api_key, ca_file)
    conversation = Conversation(server, {name: value for name, value in fields.items() if value is not None})
    if system is not None:
        conversation.messages.append({"role": "system", "content": system})
    conversation.pictures = [_data_url(path) for path in image or ()]
    try:
        for question in [message] if message is not None else _questions(console):
            _answer(conversation, question, console)
    except ServingError as error:
        console.print(f"whalepod: {escape(str(error))}")
        raise typer.Exit(1) from None


@dataclass(slots=True)
class Conversation:
    """What has been said so far, and how answers are to be drawn."""

    server: Server
    fields: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    """URLs of those to show with the next question."""

    def ask(self, question: str) -> Iterator[tuple[str, str]]:
        """(`reasoning` or `content`, a piece of it). An answer that broke off is not remembered."""
        content: str | list[dict[str, Any]] = question
        if self.pictures:
            shown = [{"type": "image_url", "image_url": {"url": url}} for url in self.pictures]
            content = [*shown, {"type": "text", "text": question}]
        asked = [*self.messages, {"role": "user", "content": content}]
        answer: list[str] = []
        for chunk in stream_chunks(self.server, "/v1/chat/completions", {**self.fields, "messages": asked}):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if delta.get("reasoning_content"):
                    yield "reasoning", delta["reasoning_content"]
                if delta.get("content"):
                    answer.append(delta["content"])
                    yield "content", delta["content"]
        self.pictures = []
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]


def _data_url(path: Path) -> str:
    """A picture's file as it travels. The server goes by its content, not by its name."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}", param_hint="--image") from None
    media_type = mimetypes.guess_type(path.name)[0] or ""
    known = media_type if media_type in ("image/png", "image/jpeg", "image/gif", "image/webp") else "image/png"
    return f"data:{known};base64,{base64.b64encode(data).decode()}"


def _questions(console: Console) -> Iterator[str]:
    prompt = "[bold]you:[/] " if sys.stdin.isatty() else ""
    while True:
        try:
            question = console.input(prompt)
        except EOFError:
            return
        if not question.strip():
            return
        yield question


def _answer(conversation: Conversation, question: str, console: Console) -> None:
    spoken = ""
    for kind, piece in conversation.ask(question):
        if kind == "content" and spoken == "reasoning":
            console.print()
        spoken = kind
        console.print(escape(piece), end="", style="dim" if kind == "reasoning" else None)
    console.print()
