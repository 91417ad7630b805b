"""`python -m whalepod.training backbone | draft | checkpoint`: the three steps of `make train-tiny`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.progress import ProgressReport
from whalepod.model.config import ModelConfig
from whalepod.model.engram_token_map import engram_token_map
from whalepod.model.tiny_checkpoint import shipped_tokenizer

from .answers import AnswerRecipe, answered
from .backbone import Backbone
from .batches import Corpus, Shape
from .compiling import prepare_compiler
from .configuration import SIZES, trained_config_json
from .draft_trainer import DraftRecipe, DraftTrainer, as_shipped
from .parameters import first_tensors, stacked
from .progress import FigureLog, Progress
from .shipping import read_trained_checkpoint, write_trained_checkpoint
from .states import load_state
from .trainer import STATE, Recipe, Trainer

LOG = "log.jsonl"


def main(arguments: list[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command != "backbone" and options.checkpoint is None and not options.state:
        parser.error("a trained backbone is needed: --checkpoint, or --state")
    if getattr(options, "device", "cpu") != "cpu":
        prepare_compiler()
    {"backbone": _backbone, "draft": _draft, "checkpoint": _checkpoint}[options.command](options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m whalepod.training")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("backbone", "train all but the drafter"), ("draft", "train the drafter")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--corpus", type=Path, required=True, help="directory of the corpus")
        command.add_argument("--out", type=Path, required=True, help="directory of the state")
        command.add_argument("--steps", type=int, required=True)
        command.add_argument("--seconds", type=float, default=None, help="end earlier, after so long")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--sequences", type=int, default=64, help="short sequences of a step")
        command.add_argument("--tokens", type=int, default=1024, help="tokens of a short sequence")
    commands.choices["backbone"].add_argument("--short-only", action="store_true", help="no long sequences")
    commands.choices["backbone"].add_argument("--resume", action="store_true", help="go on from the state in --out")
    commands.choices["draft"].add_argument(
        "--answer-tokens", type=int, default=256, help="longest answer of the backbone that the drafter learns from"
    )
    checkpoint = commands.add_parser("checkpoint", help="write a checkpoint from states")
    checkpoint.add_argument("--out", type=Path, required=True)
    for command in (commands.choices["draft"], checkpoint):
        command.add_argument("--checkpoint", type=Path, default=None, help="a checkpoint to begin with")
        command.add_argument(
            "--state",
            type=Path,
            action="append",
            default=[],
            help="of the backbone, of a drafter; a later one's tensors count, and more than the checkpoint's",
        )
    for command in commands.choices.values():
        command.add_argument("--size", choices=sorted(SIZES), default="shipped")
    return parser


def _backbone(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    config, backbone = _model(options.size, device)
    recipe = Recipe(
        short=Shape(options.sequences, options.tokens),
        long=Shape(0 if options.short_only else max(1, options.sequences // 4), options.tokens * 4),
        seed=options.seed,
    )
    trainer = Trainer.begin(
        config,
        backbone.token_map,
        Corpus.read(options.corpus, "train"),
        Corpus.read(options.corpus, "valid"),
        recipe=recipe,
        device=device,
        dtype=backbone.dtype,
    )
    if options.resume:
        trainer.resume(options.out)
    progress = Progress(SYSTEM_CLOCK, options.steps, options.seconds)
    trainer.run(progress, options.out, FigureLog(options.out / LOG))


def _draft(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    config, backbone = _model(options.size, device)
    recipe = replace(
        DraftRecipe(seed=options.seed),
        shape=Shape(options.sequences, options.tokens),
        anchors=max(1, options.tokens // 8),
    )
    tensors = {name: tensor.to(device) for name, tensor in _given_tensors(options, config).items()}
    train, valid = (Corpus.read(options.corpus, name) for name in ("train", "valid"))
    log = FigureLog(options.out / LOG)
    shipped = {name: as_shipped(name, tensor) for name, tensor in tensors.items()}
    usual = AnswerRecipe(tokens_max=options.answer_tokens, seed=options.seed)
    greedy = replace(usual, temperatures=(0.0,))

    def report(done: int, of: int) -> None:
        log.write({"answered": done, "documents": of, "documents_s": done / max(progress.elapsed_s, 1e-9)})
        told.note(done, of)

    progress = Progress(SYSTEM_CLOCK, options.steps, options.seconds)
    with ProgressReport("answers", unit="documents") as told:
        corpus = answered(train, backbone, shipped, usual, report=report)
    trainer = DraftTrainer(
        config=config,
        corpus=corpus,
        valid=answered(valid, backbone, shipped, greedy),
        recipe=recipe,
        backbone=backbone,
        tensors=tensors,
        device=device,
    )
    progress.begin()
    trainer.run(progress, options.out, log)


def _checkpoint(options: argparse.Namespace) -> None:
    write_trained_checkpoint(options.out, _given_tensors(options, _config(options.size)), size=options.size)


def _given_tensors(options: argparse.Namespace, config: ModelConfig) -> dict[str, Tensor]:
    """By stacked name, float32: a checkpoint's, or what training begins with; then those of the states."""
    checkpoint: Path | None = options.checkpoint
    if checkpoint is None:
        tensors = stacked(first_tensors(config, seed=getattr(options, "seed", 0)))
    else:
        tensors = read_trained_checkpoint(checkpoint, config)
    for directory in options.state:
        tensors |= load_state(directory, prefix=STATE)
    return {name: tensor.float() for name, tensor in tensors.items()}


def _config(size: str) -> ModelConfig:
    return ModelConfig.from_json(trained_config_json(shipped_tokenizer(), size=size))


def _model(size: str, device: torch.device) -> tuple[ModelConfig, Backbone]:
    config = _config(size)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return config, Backbone(config, engram_token_map(shipped_tokenizer(), config), dtype=dtype, device=device)


if __name__ == "__main__":
    main(sys.argv[1:])
