"""`whalepod bench`: measure the engine that serves, in this process."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from whalepod.cluster.shipped_model import shipped_model_dir

if TYPE_CHECKING:
    from whalepod.engine.rank_model import RankModel

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Model = Annotated[
    Path | None, typer.Option("--model", help="A checkpoint directory; default: the small model that ships.")
]
Drafts = Annotated[
    int | None, typer.Option(min=1, help="Drafts of a request in a step; default: as many as the model can.")
]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads, as engine.threads.")]


def model_dir(model: Path | None) -> Path:
    return model or shipped_model_dir()


def prompt_ids(model: RankModel, file: Path | None, count: int) -> list[tuple[int, ...]]:
    """Of the lines of a file; of the last `count` chats of a file of held-out text; or `count` random ones."""
    from whalepod.engine.speculation.measuring import random_prompts

    if file is None:
        return random_prompts(model, count, tokens=32, seed=0)
    if file.suffix == ".xz":
        return _chat_prompt_ids(model, file, count)
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise typer.BadParameter(f"{file} holds no prompt")
    return [(model.config.bos_token_id, *model.tokenizer.encode(line)) for line in lines]


def _chat_prompt_ids(model: RankModel, file: Path, count: int) -> list[tuple[int, ...]]:
    """The last, because `whalepod eval` measures on the first."""
    from whalepod.engine.evaluation.answers import encoder_of
    from whalepod.engine.evaluation.held_out import HeldOut

    encoder, context = encoder_of(model), model.config.max_position_embeddings
    chats = HeldOut.read(file, model.tokenizer, model.config).of_kind("chat")[-count:]
    if not chats:
        raise typer.BadParameter(f"{file} holds no chat")
    return [tuple(encoder.chat(chat.body, context_tokens=context).prompt_ids) for chat in chats]


@app.command("verify-cost")
def verify_cost(
    output: Annotated[Path, typer.Option("--output", help="The table to write: dspark.cost_table.", dir_okay=False)],
    model: Model = None,
    requests_max: Annotated[int, typer.Option(min=1, help="Largest batch: decode.slots of the rank.")] = 16,
    draft_tokens: Drafts = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps that count, of each kind.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Context of the requests: take what is usual.")] = 32,
    threads: Threads = 1,
) -> None:
    """Measure what steps cost against requests and rows, and write the table that scheduled verification reads.

    The last line is one JSON object of figures.
    """
    from whalepod.engine.rank_model import RankModel
    from whalepod.engine.speculation.measuring import CostPlan, measure_cost

    console = Console(highlight=False, soft_wrap=True)
    loaded = RankModel.load(model_dir(model), threads=threads)
    plan = CostPlan(
        requests_max=requests_max,
        draft_tokens=draft_tokens or loaded.config.dspark_block_size,
        steps=steps,
        prompt_tokens=prompt_tokens,
        hardware=f"{platform.machine()}, {threads} threads",
    )
    table = measure_cost(loaded, plan, say=console.print)
    table.write(output)
    console.print(f"written: {output}")
    console.print(json.dumps({"rows_max": table.rows_max, "rms_ms": round(table.rms_seconds * 1000, 3)}))


@app.command()
def dspark(
    model: Model = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests, all at once.")] = 8,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of each.")] = 64,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="As of `dspark calibrate`. Default: random.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling.")] = 1.0,
    draft_tokens: Drafts = None,
    cost_table: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Also measure scheduled verification with it.")
    ] = None,
    temperature_table: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Calibration of the confidences.")
    ] = None,
    simulate_acceptance: Annotated[
        float | None, typer.Option(min=0, max=1, help="Drafts stand by a coin of this bias; answers are nonsense.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way, which take turns; the fastest counts.")] = 1,
    threads: Threads = 1,
) -> None:
    """Run the same requests without drafts, with all drafts verified, and with those that pay; compare.

    The last line is one JSON object of figures.
    """
    from whalepod.engine.rank_model import RankModel
    from whalepod.engine.sampling_params import SamplingParams
    from whalepod.engine.speculation.calibration import Calibration
    from whalepod.engine.speculation.cost_table import CostTable
    from whalepod.engine.speculation.measuring import compare_ways
    from whalepod.engine.speculation.options import SpeculationOptions, Verification

    console = Console(highlight=False, soft_wrap=True)
    loaded = RankModel.load(model_dir(model), threads=threads)
    fixed = SpeculationOptions(
        draft_tokens=draft_tokens or loaded.config.dspark_block_size,
        calibration=None if temperature_table is None else Calibration.read(temperature_table),
        simulated_acceptance=simulate_acceptance,
    )
    ways: list[tuple[str, SpeculationOptions | None]] = [("off", None), ("fixed", fixed)]
    if cost_table is not None:
        cost = CostTable.read(cost_table)
        ways.append(("scheduled", replace(fixed, verification=Verification.SCHEDULED, cost=cost)))
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=answer_tokens, ignore_eos=True)
    asked = prompt_ids(loaded, prompts, requests)
    compared = compare_ways(loaded, asked, sampling, ways, slots=len(asked), repeats=repeats)
    if simulate_acceptance is not None:
        console.print(f"SIMULATED ACCEPTANCE {simulate_acceptance}: drafts stand by coin, answers are nonsense")
    table = Table("", *(each.name for each in compared), box=None)
    table.add_row("tokens/s", *(f"{each.tokens_per_second:.1f}" for each in compared))
    figures: dict[str, object] = {"requests": len(asked)}
    for each in compared:
        figures[each.name] = {"tokens_per_second": round(each.tokens_per_second, 2)}
        if each.counts is not None:
            figures[each.name] = {"tokens_per_second": round(each.tokens_per_second, 2), **each.counts.figures()}
    rows = {
        "verified length": lambda c: f"{c.verified_length:.2f}",
        "accepted length": lambda c: f"{c.accepted_length:.2f}",
        "useful share": lambda c: f"{c.useful_fraction:.1%}",
        "steps trimmed": lambda c: f"{c.trimmed_steps} of {c.steps}",
        "stands, by column": lambda c: " ".join(f"{value:.2f}" for value in c.acceptance),
        "confidence error": lambda c: " ".join(f"{value:.3f}" for value in c.calibration_error),
    }
    for name, shown in rows.items():
        table.add_row(name, *("" if each.counts is None else shown(each.counts) for each in compared))
    console.print(table)
    console.print(json.dumps(figures))
