"""What a decode step costs, by how many requests are in it and how many rows: measured, never assumed.

    seconds(R, M) = bias + requests(R) + rows(M),  and draft(R) for the drafting before it

Each term is linear between its probes and constant outside (`runtime.md` §2.3). `whalepod bench verify-cost` writes
one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from whalepod.core.errors import ConfigError

SCHEMA: Final = "whalepod.dspark.cost/1"

Probes = Sequence[tuple[int, float]]
"""(count, seconds), counts ascending."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds. Raises ConfigError if it cannot be a cost: no probes, counts that do not ascend, times of 0."""

    bias: float
    requests: Probes
    rows: Probes
    draft: Probes
    model: str = ""
    """Fingerprint of the weights that it was measured with, as hex."""
    layout: str = ""
    """Parallel sizes and threads."""
    hardware: str = ""
    draft_tokens: int = 0
    """Drafts a request in the measured steps, at most; 0: not said."""
    rms_seconds: float = 0.0
    """Of what the three terms leave unexplained of the measured steps."""

    def __post_init__(self) -> None:
        for name in ("requests", "rows", "draft"):
            probes: Probes = getattr(self, name)
            counts = [count for count, _ in probes]
            if not probes or any(low >= high for low, high in itertools.pairwise(counts)):
                raise ConfigError(f"a cost table needs ascending counts in {name!r}, not {counts}")
        most = self.rows[-1][0]
        if float(np.min(self.step_seconds(1, np.arange(1, most + 1)))) <= 0:
            raise ConfigError("a cost table says that some step takes no time")

    @property
    def rows_max(self) -> int:
        """Rows of the largest step that was measured."""
        return self.rows[-1][0]

    def step_seconds(self, requests: int, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of drafting for `requests` and then computing so many rows. A larger step is never cheaper."""
        fixed = self.bias + _between(self.requests, np.array(requests)) + _between(self.draft, np.array(requests))
        return fixed + _between(_rising(self.rows), rows)

    def check(self, *, model: str, draft_tokens: int, requests_max: int) -> None:
        """Raises ConfigError if it was not measured for this model, or not up to a step of this rank."""
        if self.model and self.model != model:
            raise ConfigError(f"the cost table was measured with weights {self.model[:12]}, these are {model[:12]}")
        wanted = requests_max * (draft_tokens + 1)
        if self.rows_max < wanted:
            raise ConfigError(
                f"the cost table ends at {self.rows_max} rows, but {requests_max} requests with {draft_tokens} drafts "
                f"are {wanted}: measure again (whalepod bench verify-cost), or lower decode.slots"
            )

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def to_json(self) -> Mapping[str, object]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "layout": self.layout,
            "hardware": self.hardware,
            "draft_tokens": self.draft_tokens,
            "bias": self.bias,
            "requests": [list(probe) for probe in self.requests],
            "rows": [list(probe) for probe in self.rows],
            "draft": [list(probe) for probe in self.draft],
            "rms_seconds": self.rms_seconds,
        }

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """Raises ConfigError, naming the file, if it is not such a table."""
        values = read_table(path, schema=SCHEMA)
        try:
            return cls(
                bias=float(values["bias"]),
                requests=_probes(values["requests"]),
                rows=_probes(values["rows"]),
                draft=_probes(values["draft"]),
                model=str(values["model"]),
                layout=str(values["layout"]),
                hardware=str(values["hardware"]),
                draft_tokens=int(values["draft_tokens"]),
                rms_seconds=float(values["rms_seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a cost table: {type(error).__name__} {error}") from None


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    requests: int
    rows: int
    seconds: float
    draft_seconds: float


def fit_cost(steps: Sequence[MeasuredStep], *, model: str, layout: str, hardware: str, draft_tokens: int) -> CostTable:
    """Least squares: one term for each count of requests, and rows between knots at powers of two, the first of each 0;
    the draft's is a median. Raises ConfigError if there are no steps."""
    if not steps:
        raise ConfigError("no steps were measured")
    request_counts = sorted({step.requests for step in steps})
    rows = np.array([step.rows for step in steps])
    knots = _knots(int(rows.min()), int(rows.max()))
    hats = np.stack([np.interp(rows, knots, np.eye(len(knots))[knot]) for knot in range(1, len(knots))], axis=1)
    own = np.array([[step.requests == count for count in request_counts[1:]] for step in steps], np.float64)
    design = np.concatenate((np.ones((len(steps), 1)), own.reshape(len(steps), -1), hats), axis=1)
    seconds = np.array([step.seconds for step in steps])
    bias, *terms = np.linalg.lstsq(design, seconds, rcond=None)[0].tolist()
    by_requests, by_rows = [0.0, *terms[: len(request_counts) - 1]], [0.0, *terms[len(request_counts) - 1 :]]
    return CostTable(
        bias=bias,
        requests=list(zip(request_counts, by_requests, strict=True)),
        rows=list(zip(knots, by_rows, strict=True)),
        draft=[(count, _median_draft(steps, count)) for count in request_counts],
        model=model,
        layout=layout,
        hardware=hardware,
        draft_tokens=draft_tokens,
        rms_seconds=float(np.sqrt(np.mean((design @ np.array([bias, *terms]) - seconds) ** 2))),
    )


def _knots(low: int, high: int) -> list[int]:
    """Powers of two between the ends, and the ends."""
    powers = itertools.takewhile(lambda power: power < high, (2**exponent for exponent in itertools.count()))
    return sorted({low, high, *(power for power in powers if power > low)})


def read_table(path: Path, *, schema: str) -> Mapping[str, Any]:
    """A JSON object of this schema. Raises ConfigError, naming the file, if it is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict) or values.get("schema") != schema:
        raise ConfigError(f"{path} is not a table of schema {schema}")
    return values


def _median_draft(steps: Sequence[MeasuredStep], requests: int) -> float:
    return float(np.median([step.draft_seconds for step in steps if step.requests == requests]))


def _between(probes: Probes, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.interp(counts, [count for count, _ in probes], [seconds for _, seconds in probes])


def _rising(probes: Probes) -> Probes:
    """The running maximum: noise must not make a larger step look cheaper."""
    highest = itertools.accumulate((seconds for _, seconds in probes), max)
    return [(count, seconds) for (count, _), seconds in zip(probes, highest, strict=True)]


def _probes(values: Sequence[Sequence[float]]) -> Probes:
    return [(int(count), float(seconds)) for count, seconds in values]
