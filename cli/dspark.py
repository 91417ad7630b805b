"""`whalepod dspark`: make the drafter's confidences honest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .bench import Drafts, Model, Threads, model_dir, prompt_ids

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """Keeps `calibrate` a command of its own, beside those to come."""


@app.command()
def calibrate(
    output: Annotated[
        Path, typer.Option("--output", help="The table to write: dspark.temperature_table.", dir_okay=False)
    ],
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="What is usual: text, one prompt a line, or chats in a file as heldout.jsonl.xz. Default: random.",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Random prompts, or chats.")] = 32,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each prompt.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling: what is usual.")] = 1.0,
    slots: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    draft_tokens: Drafts = None,
    threads: Threads = 1,
) -> None:
    """Verify every draft of some answers, and write the temperatures under which confidences predict what stands.

    The last line is one JSON object of figures.
    """
    from whalepod.engine.rank_model import RankModel
    from whalepod.engine.sampling_params import SamplingParams
    from whalepod.engine.speculation.measuring import collect_calibration

    console = Console(highlight=False, soft_wrap=True)
    loaded = RankModel.load(model_dir(model), threads=threads)
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=answer_tokens, ignore_eos=prompts is None)
    table = collect_calibration(
        loaded,
        prompt_ids(loaded, prompts, requests),
        sampling,
        draft_tokens=draft_tokens or loaded.config.dspark_block_size,
        slots=slots,
        say=console.print,
    )
    table.write(output)
    console.print(f"written: {output}")
    console.print(json.dumps({key: value for key, value in table.to_json().items() if key not in ("schema", "model")}))
