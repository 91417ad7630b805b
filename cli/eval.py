"""`whalepod eval`: what a model has learned, and what each way to serve it costs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.errors import ConfigError, ServingError
from whalepod.core.progress import ProgressReport

from .bench import Model, model_dir
from .eval_tables import tables

if TYPE_CHECKING:
    from whalepod.engine.evaluation.baseline import Baseline
    from whalepod.engine.evaluation.evaluation import Evaluation
    from whalepod.engine.evaluation.held_out import HeldOut

PARTS = ("loss", "serving", "answers", "ablations", "drafts", "speed")


Data = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="The training data: all held-out text, and the 5-gram model anew."),
]
Text = Annotated[
    Path | None,
    typer.Option("--held-out", exists=True, dir_okay=False, help="Held-out text; default: the data's, or the model's."),
]
Part = Annotated[list[str] | None, typer.Option("--part", help=f"Only this; may be repeated: {', '.join(PARTS)}.")]
Record = Annotated[bool, typer.Option("--record", help="Write the baseline of --data beside the model's weights.")]


def evaluate(
    model: Model = None,
    quick: Annotated[bool, typer.Option("--quick", help="A sample: under 3 minutes on 2 cores.")] = False,
    data: Data = None,
    held_out: Text = None,
    part: Part = None,
    record: Record = False,
    temperature: Annotated[float, typer.Option(min=0, help="Of the answers that are drafted.")] = 0.0,
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the figures here.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all cores.")] = None,
) -> None:
    """Measure held-out loss, recall, JSON and tool calls, what approximations of serving cost, what each part of the
    network is worth, and what drafts are.

    The last line is one JSON object of figures. Exits with 1 if a request fails.
    """
    from whalepod.engine.evaluation.evaluation import FULL, QUICK, Evaluation
    from whalepod.engine.evaluation.held_out import HeldOut
    from whalepod.model.config import ModelConfig
    from whalepod.model.tokenizer import Tokenizer

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    parts = _checked(part)
    if record and data is None:
        raise ConfigError("--record writes the baseline that --data gives: name the data too")
    directory = model_dir(model)
    text = HeldOut.read(
        held_out or _held_out_file(directory, data), Tokenizer.from_dir(directory), ModelConfig.from_dir(directory)
    )
    started_s = SYSTEM_CLOCK.monotonic_s()
    with ExitStack() as bars:
        baseline = _baseline(directory, data, text) if "loss" in parts else None
        if record and baseline is not None:
            _write_baseline(baseline, directory)
        evaluation = Evaluation(
            directory=directory,
            held_out=text,
            plan=QUICK if quick else FULL,
            begin=_begin(bars),
            threads=threads or os.cpu_count() or 1,
        )
        try:
            _run(evaluation, parts, baseline, temperature=temperature)
        except ServingError as error:
            console.print(f"whalepod: a request failed: {error}")
            raise typer.Exit(1) from None
    figures = {
        **evaluation.figures,
        "quick": quick,
        "held_out_sha256": text.sha256,
        "model": evaluation.model.weights,
        "seconds": round(SYSTEM_CLOCK.monotonic_s() - started_s, 1),
    }
    if baseline is not None:
        figures |= {"baseline_recorded": baseline.recorded, "baseline_training_sha256": baseline.training_sha256}
    for table in tables(figures):
        console.print(table)
    _tell_of_baseline(console, baseline, wanted="loss" in parts)
    if output is not None:
        output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    console.print(json.dumps(figures))


def _run(evaluation: Evaluation, parts: tuple[str, ...], baseline: Baseline | None, *, temperature: float) -> None:
    from whalepod.engine.speculation.calibration import Calibration
    from whalepod.engine.speculation.options import TEMPERATURES_FILE

    drafts = evaluation.model.config.num_nextn_predict_layers > 0
    beside = evaluation.directory / TEMPERATURES_FILE

    def measure_drafts() -> object:
        table = Calibration.read(beside) if beside.exists() else None
        return evaluation.measure_drafts(table, temperature=temperature)

    measures: dict[str, Callable[[], object]] = {
        "loss": lambda: evaluation.measure_loss(baseline),
        "serving": evaluation.measure_serving,
        "answers": evaluation.measure_answers,
        "ablations": evaluation.measure_ablations,
        "drafts": measure_drafts,
        "speed": evaluation.measure_speed,
    }
    for name in parts:
        if drafts or name not in ("drafts", "speed"):
            measures[name]()


def _checked(wanted: list[str] | None) -> tuple[str, ...]:
    unknown = sorted(set(wanted or ()) - set(PARTS))
    if unknown:
        raise ConfigError(f"--part must be one of {', '.join(PARTS)}, not {', '.join(unknown)}")
    return tuple(name for name in PARTS if not wanted or name in wanted)


def _held_out_file(directory: Path, data: Path | None) -> Path:
    """The whole of it with the data, the sample beside the model without."""
    from whalepod.engine.evaluation.held_out import HELD_OUT_FILE

    places = [place / HELD_OUT_FILE for place in (data, directory) if place is not None]
    for path in places:
        if path.exists():
            return path
    raise ConfigError(f"there is no held-out text at {', '.join(map(str, places))}: name a file with --held-out")


def _baseline(directory: Path, data: Path | None, text: HeldOut) -> Baseline | None:
    """Computed from the data, or the recorded one; None: none was recorded for this text."""
    from whalepod.engine.evaluation.baseline import BASELINE_FILE, Baseline, read_training_tokens
    from whalepod.model.config import ModelConfig

    if data is None:
        return Baseline.read(directory / BASELINE_FILE, held_out_sha256=text.sha256)
    config = ModelConfig.from_dir(directory)
    with _report("5-gram baseline") as report:
        return Baseline.computed(
            read_training_tokens(data),
            text.documents,
            held_out_sha256=text.sha256,
            vocab_size=config.vocab_size,
            bos_id=config.bos_token_id,
            progress=report.note,
        )


def _write_baseline(baseline: Baseline, directory: Path) -> None:
    from whalepod.engine.evaluation.baseline import BASELINE_FILE

    baseline.write(directory / BASELINE_FILE)


def _tell_of_baseline(console: Console, baseline: Baseline | None, *, wanted: bool) -> None:
    if not wanted:
        return
    if baseline is None:
        console.print("5-gram baseline: none is recorded for this model and text; --data computes it")
        return
    how = "recorded beside the model" if baseline.recorded else "computed now"
    tokens, name = baseline.training_tokens, baseline.training_sha256
    console.print(f"5-gram baseline: {how}, from {tokens} training tokens with SHA-256 {name}")


def _report(name: str, total: int | None = None) -> ProgressReport:
    """On stderr, so that stdout holds tables and figures only."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    return ProgressReport(name, unit="items", total=total, say=console.print, console=console)


def _begin(bars: ExitStack) -> Callable[[str, int], Callable[[], None]]:
    """One at a time: the next one ends the one before."""

    def begin(name: str, total: int) -> Callable[[], None]:
        bars.close()
        return bars.enter_context(_report(name, total)).advance

    return begin
