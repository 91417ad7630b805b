"""A bug as one change of one source, and what it is looked for with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Arithmetic(Enum):
    """What the checks calculate with: where a bug lies decides."""

    REFERENCE = "the reference kernels"
    OPERATORS = "the compiled operators"
    DEFAULT = "whatever is there"


@dataclass(frozen=True)
class PlantedBug:
    """`right` occurs once in `file` (relative to the repository) and becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str

    @property
    def compiled(self) -> bool:
        return self.file.endswith(".c")

    @property
    def arithmetic(self) -> Arithmetic:
        if self.compiled:
            return Arithmetic.OPERATORS
        return Arithmetic.REFERENCE if self.file.startswith("kernels/") else Arithmetic.DEFAULT

    def planted(self, source: str) -> str:
        """Raises ValueError unless `right` occurs exactly once."""
        if source.count(self.right) != 1:
            raise ValueError(f"{self.name}: {self.file} has {source.count(self.right)} places for this bug, not 1")
        return source.replace(self.right, self.wrong)
