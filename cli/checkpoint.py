"""`whalepod checkpoint`: write tiny checkpoints and tokenizers, check and name checkpoints."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint directory.", file_okay=False)]


class Form(StrEnum):
    """Mirrors `WeightFormat`: the command must list its values without importing torch."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    RELEASE = "release"


class Role(StrEnum):
    """Mirrors `ModelRole`."""

    FULL = "full"
    ENCODER = "encoder"


@app.command()
def tiny(
    directory: Directory,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    form: Annotated[
        Form,
        typer.Option(
            "--format", help="Plain float32 or bfloat16, or as released: FP8 blocks, packed FP4 experts, two shards."
        ),
    ] = Form.FLOAT32,
    force: Annotated[bool, typer.Option("--force", help="Replace a checkpoint that is there.")] = False,
    experts: Annotated[
        int | None, typer.Option(min=3, help="Routed experts of a layer; default: 16. The released model has 384.")
    ] = None,
) -> None:
    """Write a tiny random model in the released layout, with the shipped tokenizer."""
    from whalepod.model.checkpoint_writer import WeightFormat
    from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

    overrides = {} if experts is None else {"n_routed_experts": experts}
    config = write_tiny_checkpoint(directory, seed=seed, form=WeightFormat(form.value), force=force, **overrides)
    typer.echo(
        f"{directory}: {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, window {config.window}, "
        f"blocks of {config.block_tokens} tokens, context {config.max_position_embeddings}"
    )


@app.command()
def tokenizer(
    output: Annotated[Path, typer.Argument(metavar="FILE", help="The tokenizer.json to write.", dir_okay=False)],
    text: Annotated[
        list[Path], typer.Option("--text", exists=True, dir_okay=False, help="UTF-8 text; may be repeated.")
    ],
    entries: Annotated[int, typer.Option(min=512, help="Entries of the vocabulary.")] = 6144,
) -> None:
    """Train a byte-level tokenizer with V4.1's special tokens."""
    from whalepod.model.tokenizer_training import train_tokenizer

    trained = train_tokenizer((path.read_text(encoding="utf-8") for path in text), vocab_size=entries)
    trained.save(str(output))
    typer.echo(f"{output}: {trained.get_vocab_size()} entries")


@app.command()
def check(
    directory: Directory,
    role: Annotated[Role, typer.Option(help="Whose tensors must be there.")] = Role.FULL,
) -> None:
    """Check that configuration, tensors and tokenizer fit each other. Reads headers only."""
    from whalepod.model.checkpoint import check_tensors
    from whalepod.model.config import ModelConfig
    from whalepod.model.engram_token_map import engram_token_map
    from whalepod.model.tensor_layout import ModelRole
    from whalepod.model.tokenizer import Tokenizer

    config = ModelConfig.from_dir(directory)
    tensors = check_tensors(directory, config, role=ModelRole(role.value))
    words = Tokenizer.from_dir(directory)
    if config.engram_layer_ids:
        engram_token_map(words, config)
    typer.echo(f"{directory}: {tensors} tensors of role {role.value}, {words.ids_end} tokens; everything fits")


@app.command()
def fingerprint(
    directory: Directory,
    write: Annotated[
        bool, typer.Option("--write", help="Write SHA256SUMS, so that starts need not read the weights.")
    ] = False,
) -> None:
    """Print the name of the weights: ranks share stored state only if theirs agree. Reads every weight file."""
    from rich.console import Console

    from whalepod.core.progress import MIB, ProgressReport
    from whalepod.model.checkpoint import shard_paths
    from whalepod.model.weights_fingerprint import weight_file_hashes, weights_fingerprint, write_sums

    total = sum(path.stat().st_size for path in shard_paths(directory))
    report = ProgressReport("hashing", unit="MiB", unit_size=MIB, total=total, say=Console(stderr=True).print)
    with report:
        name = weights_fingerprint(directory, progress=report.advance)
    if write:
        write_sums(directory, weight_file_hashes(directory))
    typer.echo(name.hex())
