"""Checks the model against recorded vectors of the released reference (`whalepod golden`): what a check reports.

    conformity_runner.py   finds the vector folders of a directory tree and runs every file in them
    conformity_folder.py   one folder: its checkpoints, prompts and files
    conformity_units.py    operations without a checkpoint
    conformity_rows.py     prefill, decode, selection and tail sets: rows of a prompt through the network
    conformity_detail.py   every layer's intermediate values, and the caches
    conformity_draft.py    the drafter's windows and rounds
    conformity_engram.py   token map, hash tables and table rows
    conformity_vision.py   sizes of images, their patches and embeddings, and a prompt with images

The directory's format is described in `tests/golden/README.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from whalepod.core.errors import CheckpointError

from .forward_pass import Recorder

LOGITS_TOLERANCE = 1e-4
"""Largest difference of logits that rounding explains: the reference in float64 is within 1.6e-5 of its float32."""
FAILURES_SHOWN = 3


class Status(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    """The vectors describe something that this model does not do, by design."""
    NOT_IMPLEMENTED = "not implemented"
    """The vectors describe something that this version lacks: none do."""


@dataclass(frozen=True, slots=True)
class SetResult:
    """What came out of one set of vectors."""

    name: str
    """Path of the folder below the directory, then the set: `tiny_a/decode_f32 split17`."""
    status: Status
    max_abs: float | None = None
    """Largest absolute difference of a float, None where nothing was compared as numbers."""
    detail: str = ""


@dataclass(slots=True)
class Comparison:
    """Collects the differences of one set. Whatever disagrees beyond its tolerance becomes a line of `failures`."""

    name: str
    max_abs: float | None = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def floats(self, label: str, got: Tensor, wanted: Tensor, *, tolerance: float = LOGITS_TOLERANCE) -> None:
        """Absolute difference of every element at most `tolerance`."""
        if got.shape != wanted.shape:
            self.fail(f"{label}: shape {list(got.shape)}, not {list(wanted.shape)}")
            return
        difference = largest_difference(got.cpu(), wanted)
        self.max_abs = max(self.max_abs or 0.0, difference)
        if not difference <= tolerance:
            self.fail(f"{label}: {difference:.2e} > {tolerance:.0e}")

    def roughly(self, label: str, got: Tensor, wanted: Tensor, *, share: float) -> None:
        """For arithmetic in bfloat16: largest difference at most `share` of the largest value. No part of `max_abs`."""
        difference, limit = largest_difference(got.cpu(), wanted), share * float(wanted.abs().max())
        if not difference <= limit:
            self.fail(f"{label}: {difference:.2e} > {limit:.2e}")

    def equal(self, label: str, got: Tensor, wanted: Tensor) -> None:
        """Integers or bytes, all the same."""
        if got.shape != wanted.shape:
            self.fail(f"{label}: shape {list(got.shape)}, not {list(wanted.shape)}")
        elif not torch.equal(got.cpu().long(), wanted.long()):
            self.fail(f"{label}: {int((got.cpu().long() != wanted.long()).sum())} of {wanted.numel()} differ")

    def fail(self, message: str) -> None:
        self.failures.append(message)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def result(self) -> SetResult:
        if not self.failures:
            return SetResult(self.name, Status.PASSED, self.max_abs, "; ".join(self.notes))
        more = [f"{len(self.failures) - FAILURES_SHOWN} more"] if len(self.failures) > FAILURES_SHOWN else []
        return SetResult(self.name, Status.FAILED, self.max_abs, "; ".join(self.failures[:FAILURES_SHOWN] + more))


def largest_difference(got: Tensor, wanted: Tensor) -> float:
    """Infinity if a difference is no number, 0 if there are no elements."""
    if wanted.numel() == 0:
        return 0.0
    difference = float((got.double() - wanted.double()).abs().max())
    return math.inf if math.isnan(difference) else difference


class MissingArrayError(Exception):
    """A file of vectors lacks an array."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """The arrays of one file."""

    arrays: Mapping[str, Tensor]

    @classmethod
    def load(cls, path: Path) -> Vectors:
        """Raises CheckpointError if the file cannot be read."""
        try:
            return cls(load_file(path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        """Raises MissingArrayError."""
        if name not in self.arrays:
            raise MissingArrayError(name)
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def below(self, prefix: str) -> Vectors:
        """The arrays whose names start with `prefix`, without it."""
        return Vectors({n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)})

    def heads(self) -> list[str]:
        """First parts of the names, each once, in order."""
        return list(dict.fromkeys(name.split(".", 1)[0] for name in sorted(self.arrays)))


def on_cpu(recorder: Recorder | None) -> Recorder | None:
    """A recorder that is shown what it records where the vectors are."""
    return None if recorder is None else lambda name, value: recorder(name, value.cpu())


def compare(name: str, check: Callable[[Comparison], None]) -> SetResult:
    """Run one check, without gradients as a rank does, and report it. An array that the format promises but the file
    lacks fails the check."""
    comparison = Comparison(name)
    try:
        with torch.inference_mode():
            check(comparison)
    except MissingArrayError as error:
        comparison.fail(f"the file has no array {error}")
    return comparison.result()
