"""Finds and runs every set of vectors in a directory tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from whalepod.core.errors import CheckpointError, ConfigError

from .conformity import Comparison, SetResult, Status, Vectors, compare
from .conformity_detail import check_detail
from .conformity_draft import check_drafts
from .conformity_engram import check_engram
from .conformity_folder import Mode, VectorFolder, parse_file, vector_folders
from .conformity_rows import (
    check_decode,
    check_prefill,
    check_selection,
    check_tail_exact,
    check_tail_hit,
    check_tail_kept,
)
from .conformity_units import run_unit_sets
from .conformity_vision import check_image_grid, check_image_prompt, check_vision

UNITS = "units.safetensors"

SetRunner = Callable[[VectorFolder, Vectors, Mode, str], Iterator[SetResult]]
"""Runs the sets of one file: folder, its arrays, mode, name to report under."""
Check = Callable[[Comparison, Vectors, VectorFolder, Mode], None]

CHECKS: Mapping[str, Check] = {
    "prefill": check_prefill,
    "detail": check_detail,
    "selection": check_selection,
    "decode": check_decode,
    "dspark": check_drafts,
    "vision": check_vision,
    "vl": check_image_prompt,
}
WHOLE_FILES: Mapping[str, Callable[[Comparison, Vectors, VectorFolder], None]] = {
    "engram": check_engram,
    "image_grid": check_image_grid,
}
"""By the file's whole name: these have no precision mode."""
EXACT = ("detail", "selection", "engram", "vision", "image_grid")
"""Sets that compare single values or choices: bfloat16 moves them."""


def run_directory(
    directory: Path, *, runners: Mapping[str, SetRunner], device: str = "cpu", rounded: bool = False
) -> Iterator[SetResult]:
    """Every set at or below `directory`, in the order of their paths, on `device`. `rounded`: by a network in bfloat16
    with quantised caches, which leaves out what must be equal.

    `runners` checks kinds of sets that need more than the model. Raises ConfigError if `directory` is none or holds no
    vectors.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    units = sorted(directory.rglob(UNITS))
    folders = vector_folders(directory)
    if not units and not folders:
        raise ConfigError(f"{directory} holds no golden vectors: no {UNITS}, no ckpt_* directory with a config.json")
    for path in units:
        name = path.relative_to(directory).with_suffix("").as_posix()
        if not rounded:
            yield from _or_failed(name, lambda path=path, name=name: run_unit_sets(path, name))
    for path in folders:
        name = path.relative_to(directory).as_posix()
        yield from _or_failed(
            name,
            lambda path=path, name=name: _run_folder(
                VectorFolder.open(path, name, device=device), runners, rounded=rounded
            ),
        )


def _or_failed(name: str, run: Callable[[], Iterator[SetResult]]) -> Iterator[SetResult]:
    """The results of `run`; files that cannot be used are a failed set, and the rest goes on."""
    try:
        yield from run()
    except (CheckpointError, ConfigError) as error:
        yield SetResult(name, Status.FAILED, detail=str(error))


def _run_folder(folder: VectorFolder, runners: Mapping[str, SetRunner], *, rounded: bool) -> Iterator[SetResult]:
    files = [path for path in folder.files() if path.name != UNITS]
    if not files:
        yield SetResult(folder.name, Status.FAILED, detail="the folder has a checkpoint, but no vectors")
    for path in files:
        name = f"{folder.name}/{path.stem}"
        yield from _or_failed(name, lambda path=path, name=name: _run_file(folder, path, name, runners, rounded))


def _run_file(
    folder: VectorFolder, path: Path, name: str, runners: Mapping[str, SetRunner], rounded: bool
) -> Iterator[SetResult]:
    vectors = Vectors.load(path)
    if rounded and path.stem in EXACT:
        return
    if path.stem in WHOLE_FILES:
        yield compare(name, lambda c: WHOLE_FILES[path.stem](c, vectors, folder))
        return
    file = parse_file(path)
    if file is None:
        yield SetResult(name, Status.FAILED, detail="the name says neither set nor precision mode")
    else:
        mode = Mode.OURS_BF16 if rounded and not file.mode.quantised_weights else file.mode
        if file.kind is not None:
            yield from _run_set(folder, vectors, mode, file.kind, name, runners)
            return
        for kind in vectors.heads():
            yield from _run_set(folder, vectors.below(f"{kind}."), mode, kind, f"{name} {kind}", runners)


def _run_set(
    folder: VectorFolder, vectors: Vectors, mode: Mode, kind: str, name: str, runners: Mapping[str, SetRunner]
) -> Iterator[SetResult]:
    if mode is Mode.OURS_BF16 and kind in EXACT:
        yield SetResult(name, Status.NOT_APPLICABLE, detail="bfloat16 moves what must be equal")
    elif kind in runners:
        yield from runners[kind](folder, vectors, mode, name)
    elif kind == "tail":
        yield from _run_tail(folder, vectors, mode, name)
    elif kind in CHECKS:
        check = CHECKS[kind]
        yield compare(name, lambda c: check(c, vectors, folder, mode))
    else:
        yield SetResult(name, Status.FAILED, detail=f"nothing knows sets of kind {kind!r}")


def _run_tail(folder: VectorFolder, vectors: Vectors, mode: Mode, name: str) -> Iterator[SetResult]:
    for head in vectors.heads():
        label = f"{name} {head}"
        if head == "exact":
            yield compare(label, partial(check_tail_exact, vectors=vectors, folder=folder, mode=mode))
        elif head == "firstwin1":
            yield compare(label, partial(check_tail_kept, vectors=vectors, folder=folder, mode=mode))
        elif head == "firstwin0":
            why = "the last KV source always sees its full window"
            yield SetResult(label, Status.NOT_APPLICABLE, detail=why)
        elif head.startswith("hit"):
            yield compare(label, partial(check_tail_hit, vectors=vectors, folder=folder, mode=mode, head=head))
        else:
            yield SetResult(label, Status.FAILED, detail="nothing knows this group of arrays")
