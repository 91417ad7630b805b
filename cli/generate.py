"""`whalepod generate`: complete one prompt, through a cluster or in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from whalepod.core.errors import ServingError

from .chat import DEFAULT_URL, ApiKey, CaFile
from .event_stream import Server, stream_chunks


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on with.")],
    url: Annotated[
        str, typer.Option("--url", envvar="WHALEPOD_URL", help="Where the router listens; not with --model.")
    ] = DEFAULT_URL,
    model: Annotated[
        Path | None, typer.Option("--model", help="A checkpoint directory: run it here, without a cluster.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same completion.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
) -> None:
    """Complete PROMPT and print the completion as it comes."""
    console = Console(highlight=False, soft_wrap=True)
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    server = Server(url, api_key, ca_file)
    pieces = _here(model, prompt, fields, stop or []) if model is not None else _through(server, prompt, fields, stop)
    try:
        for piece in pieces:
            console.print(escape(piece), end="")
    except ServingError as error:
        console.print(f"whalepod: {escape(str(error))}")
        raise typer.Exit(1) from None
    console.print()


def _through(server: Server, prompt: str, fields: dict[str, Any], stop: list[str] | None) -> Iterator[str]:
    """Pieces of a cluster's completion."""
    for chunk in stream_chunks(server, "/v1/completions", {"prompt": prompt, "stop": stop, **fields}):
        for choice in chunk["choices"]:
            yield choice["text"]


def _here(model: Path, prompt: str, fields: dict[str, Any], stop: list[str]) -> Iterator[str]:
    """The whole completion of this process. Raises ServingError, CheckpointError."""
    from whalepod.engine.llm import LLM
    from whalepod.engine.sampling_params import SamplingParams
    from whalepod.model.detokenizer import Detokenizer
    from whalepod.model.tokenizer import Tokenizer

    (result,) = LLM(model).generate([prompt], SamplingParams(**fields))
    if result.error is not None:
        raise result.error
    text = Detokenizer(Tokenizer.from_dir(model), stop=stop)
    yield text.push(result.output.token_ids) + text.finish()
