"""Checks the model against recorded vectors of the released reference (`whalepod golden`): what a check reports.

A directory tree may hold `units.safetensors` and any number of vector folders (a `ckpt_*` directory beside
`*.safetensors` files named after set and precision mode). `conformity_sets.py` finds and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

LOGITS_TOLERANCE = 1e-4
"""Largest difference of logits that rounding explains: the reference in float64 is within 1.6e-5 of its float32."""


class Status(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    """The vectors describe something that this model does not do, by design."""
    NOT_IMPLEMENTED = "not implemented"


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
    """Collects the differences of one set. Anything that disagrees beyond its tolerance becomes a line of `failures`."""

    name: str
    max_abs: float = 0.0
    failures: list[str] | None = None
    notes: str = ""

    def floats(self, label: str, got: Tensor, wanted: Tensor, *, tolerance: float = LOGITS_TOLERANCE) -> None:
        """Absolute difference of every element at most `tolerance`."""
        if got.shape != wanted.shape:
            self.fail(f"{label}: shape {list(got.shape)}, not {list(wanted.shape)}")
            return
        if wanted.numel() == 0:
            return
        difference = float((got.double() - wanted.double()).abs().max())
        # A NaN is no number to compare with: it must not pass as "not larger".
        self.max_abs = max(self.max_abs, difference if difference == difference else float("inf"))
        if not difference <= tolerance:
            self.fail(f"{label}: {difference:.2e} > {tolerance:.0e}")

    def equal(self, label: str, got: Tensor, wanted: Tensor) -> None:
        """Integers or bytes, all the same."""
        if got.shape != wanted.shape:
            self.fail(f"{label}: shape {list(got.shape)}, not {list(wanted.shape)}")
        elif not torch.equal(got.long(), wanted.long()):
            self.fail(f"{label}: {int((got.long() != wanted.long()).sum())} of {wanted.numel()} differ")

    def fail(self, message: str) -> None:
        self.failures = [*(self.failures or []), message]

    def result(self) -> SetResult:
        if self.failures is None:
            return SetResult(self.name, Status.PASSED, self.max_abs, self.notes)
        shown = "; ".join(self.failures[:3])
        more = f"; {len(self.failures) - 3} more" if len(self.failures) > 3 else ""
        return SetResult(self.name, Status.FAILED, self.max_abs, shown + more)


@dataclass(frozen=True, slots=True)
class Vectors:
    """The arrays of one file."""

    arrays: Mapping[str, Tensor]

    @classmethod
    def load(cls, path: Path) -> Vectors:
        return cls(load_file(path))

    def __getitem__(self, name: str) -> Tensor:
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays

    def below(self, prefix: str) -> Vectors:
        """The arrays whose names start with `prefix`, without it."""
        return Vectors({n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)})

    def heads(self) -> list[str]:
        """First parts of the names, each once, in order."""
        return list(dict.fromkeys(name.split(".", 1)[0] for name in self.arrays))


def compare(name: str, check: Callable[[Comparison], None]) -> SetResult:
    """Run one check and report it. A vector that is missing fails the set; a bug of ours is not caught."""
    comparison = Comparison(name)
    check(comparison)
    return comparison.result()
