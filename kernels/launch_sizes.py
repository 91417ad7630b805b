"""The sizes that kernels are launched with: measured for each architecture, kept in `launch_tables/`.

launch_tables/sm_90.json ─▶ read once, checked ─▶ launch_sizes("swiglu", x, rows=48) ─▶ {"ROWS": 8, …}

A table holds, for a kernel and a shape ("any": for those that are not named), the sizes from so many rows on. They
change no bits, whatever the rows; or they do, and then the table also says what `exact` takes for any number of rows.
Ranks say by `exact_fingerprint` that they agree on that, and refuse each other if they do not. So an `exact` row's bits
depend neither on the rows beside it nor on who tuned which table.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from whalepod.core.errors import ConfigError

from .fallbacks import note_fallback
from .numerics import tiled
from .tunable_kernels import TUNABLES, Tunable

FOLDER = Path(__file__).with_name("launch_tables")
ANY = "any"
EXACT = "exact"

Sizes: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Lines:
    """Of one kernel and shape: `sizes[i]` from `rows_min[i]` rows on, ascending from 0."""

    rows_min: tuple[int, ...]
    sizes: tuple[Sizes, ...]
    exact: Sizes | None = None
    """Of a kernel whose sizes change bits."""

    def pick(self, rows: int, *, exact: bool) -> Sizes:
        if exact and self.exact is not None:
            return self.exact
        return self.sizes[bisect_right(self.rows_min, rows) - 1]


Shapes: TypeAlias = Mapping[str, Lines]


@dataclass(frozen=True, slots=True)
class LaunchTable:
    architecture: int
    """Of sm_90: 90."""
    measured_on: str | None
    """None: not measured, it only says what the chip has room for."""
    kernels: Mapping[str, Shapes]


def launch_sizes(
    kernel: str, x: Tensor, *, rows: int, shape: int | None = None, exact: bool | None = None
) -> Mapping[str, Any]:
    """Sizes for a launch over so many rows on the device of x. `exact`: a row's bits must not depend on the rows beside
    it; None: as `numerics.tiled` says. On a CPU, where Triton's interpreter runs: those of the chip measured first."""
    shapes = (_on_gpu(x.device) if x.is_cuda else sizes_by_shape(None))[kernel]
    lines = shapes.get(str(shape)) or shapes[ANY]
    sizes = lines.pick(rows, exact=tiled() if exact is None else exact)
    return {**sizes, **_forced[kernel]} if kernel in _forced else sizes


@contextmanager
def forced(kernel: str, **sizes: int) -> Generator[None]:
    """Within it, on every thread, `kernel` is launched with these sizes, whatever the table says. For the tuner and for
    tests."""
    before = _forced.get(kernel)
    _forced[kernel] = sizes
    try:
        yield
    finally:
        if before is None:
            del _forced[kernel]
        else:
            _forced[kernel] = before


_forced: dict[str, dict[str, int]] = {}


@cache
def sizes_by_shape(architecture: int | None) -> Mapping[str, Shapes]:
    """Every kernel's lines for a chip: of its own table, or of the nearest chip's; for what that lacks those of the
    nearest measured one; then those of the first one, which has all. None: as for the first."""
    tables = repository_tables()
    measured = {number: table for number, table in tables.items() if table.measured_on is not None}
    layers = [nearest(0, measured), nearest(architecture, measured), nearest(architecture, tables)]
    sizes: dict[str, Shapes] = {}
    for table in (*layers, _given.get(architecture or 0)):
        sizes |= {} if table is None else table.kernels
    return sizes


def use_table(file: Path, architecture: int) -> None:
    """From here on the process takes this table's sizes, and for what it does not name those of the repository. Before
    the first launch. Raises ConfigError, naming the file, if it is malformed or another chip's."""
    table = read_table(file)
    if table.architecture != architecture:
        raise ConfigError(
            f"{file} is a table for sm_{table.architecture}, and the GPU is sm_{architecture}: "
            "`whalepod kernels tune` makes one for it"
        )
    _given[architecture] = table
    sizes_by_shape.cache_clear()
    _on_gpu.cache_clear()


_given: dict[int, LaunchTable] = {}


def exact_fingerprint(architecture: int) -> str:
    """Of all sizes that change bits, as `exact` takes them."""
    exact = {
        f"{kernel} {shape}": dict(lines.exact)
        for kernel, shapes in sizes_by_shape(architecture).items()
        for shape, lines in shapes.items()
        if lines.exact is not None
    }
    return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:8]


@cache
def repository_tables() -> Mapping[int, LaunchTable]:
    """By architecture. Raises ConfigError, naming file, kernel and field, if one is malformed."""
    tables = [read_table(file) for file in sorted(FOLDER.glob("sm_*.json"))]
    return {table.architecture: table for table in tables}


def nearest(architecture: int | None, tables: Mapping[int, LaunchTable]) -> LaunchTable:
    """Of this chip, else of the newest before it, else of the oldest."""
    before = [number for number in tables if architecture is not None and number <= architecture]
    return tables[max(before) if before else min(tables)]


def architecture_of(device: torch.device) -> int:
    """Of a GPU: 90 for sm_90."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _on_gpu(device: torch.device) -> Mapping[str, Shapes]:
    """Notes a fallback if no sizes were measured on such a chip."""
    architecture = architecture_of(device)
    measured = sorted(number for number, table in repository_tables().items() if table.measured_on is not None)
    if architecture not in measured and architecture not in _given:
        note_fallback(
            "launch_sizes",
            f"this GPU is sm_{architecture}, which `whalepod kernels tune` measures",
            runs=f"kernels with sizes measured on {', '.join(f'sm_{number}' for number in measured)}",
        )
    return sizes_by_shape(architecture)


def read_table(file: Path) -> LaunchTable:
    """Raises ConfigError, naming file, kernel and field, if it is malformed."""
    try:
        return parse_table(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{file}: {error}") from error


def parse_table(text: str) -> LaunchTable:
    """Raises ConfigError, naming kernel and field."""
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"is not JSON: {error}") from error
    fields = {"architecture", "measured_on", "kernels"}
    if not isinstance(table, dict) or set(table) != fields:
        raise ConfigError(f"must be an object with exactly {', '.join(sorted(fields))}")
    architecture, measured_on, kernels = table["architecture"], table["measured_on"], table["kernels"]
    if type(architecture) is not int or architecture < 1:
        raise ConfigError(f"architecture is {architecture!r}; it is a whole number, 90 for sm_90")
    if measured_on is not None and not isinstance(measured_on, str):
        raise ConfigError(f"measured_on is {measured_on!r}; it names chip and versions, or is null")
    if not isinstance(kernels, dict):
        raise ConfigError("kernels must be an object: kernel, shape, rows, sizes")
    return LaunchTable(architecture, measured_on, {name: _shapes(name, shapes) for name, shapes in kernels.items()})


def _shapes(kernel: str, shapes: object) -> Shapes:
    if kernel not in TUNABLES:
        raise ConfigError(f"{kernel} is no kernel whose sizes are tuned; those are {', '.join(sorted(TUNABLES))}")
    if not isinstance(shapes, dict) or ANY not in shapes:
        raise ConfigError(f'{kernel} must be an object of shapes, "{ANY}" among them')
    return {shape: _lines(f"{kernel}, shape {shape}", TUNABLES[kernel], lines) for shape, lines in shapes.items()}


def _lines(where: str, tunable: Tunable, lines: object) -> Lines:
    if not isinstance(lines, dict) or "0" not in lines:
        raise ConfigError(f'{where}: must be an object of numbers of rows, "0" among them')
    if (EXACT in lines) != tunable.changes_bits:
        wanted = "sizes change bits: it needs" if tunable.changes_bits else "sizes change no bits: it must not have"
        raise ConfigError(f'{where}: {wanted} a line "{EXACT}"')
    rows = [key for key in lines if key != EXACT]
    for key in rows:
        if not key.isdecimal() or key != str(int(key)):
            raise ConfigError(f'{where}: {key!r} is no number of rows, nor "{EXACT}"')
    ascending = sorted(map(int, rows))
    checked = {key: _sizes(f"{where}, rows {key}", tunable, sizes) for key, sizes in lines.items()}
    return Lines(tuple(ascending), tuple(checked[str(number)] for number in ascending), checked.get(EXACT))


def _sizes(where: str, tunable: Tunable, sizes: object) -> Sizes:
    if not isinstance(sizes, dict) or set(sizes) != set(tunable.sizes):
        raise ConfigError(f"{where}: must be an object with exactly {', '.join(tunable.sizes)}")
    for name, value in sizes.items():
        if type(value) is not int or value not in tunable.sizes[name]:
            raise ConfigError(f"{where}: {name} is {value!r}; it may be {', '.join(map(str, tunable.sizes[name]))}")
    return sizes


def write_table(table: LaunchTable) -> str:
    """As `parse_table` reads it: a line for each number of rows."""
    kernels = ",\n".join(f"    {json.dumps(name)}: {_written(table.kernels[name])}" for name in sorted(table.kernels))
    head = f'{{\n  "architecture": {table.architecture},\n  "measured_on": {json.dumps(table.measured_on)},\n'
    return f'{head}  "kernels": {{\n{kernels}\n  }}\n}}\n'


def _written(shapes: Shapes) -> str:
    texts: list[str] = []
    for shape, lines in shapes.items():
        named = [] if lines.exact is None else [(EXACT, lines.exact)]
        named += [(str(rows), sizes) for rows, sizes in zip(lines.rows_min, lines.sizes, strict=True)]
        inside = ",\n".join(f"        {json.dumps(key)}: {json.dumps(sizes)}" for key, sizes in named)
        texts.append(f"      {json.dumps(shape)}: {{\n{inside}\n      }}")
    return "{\n" + ",\n".join(texts) + "\n    }"
