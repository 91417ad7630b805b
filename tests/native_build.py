"""Builds the compiled halves beside their sources, as installing does: `python -m tests.native_build`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULE = "whalepod.kernels.native._operators"
VALUES_MODULE = "whalepod.kvstore._native_values"


def compiler() -> str | None:
    return shutil.which("cc")


def build(folder: Path, *more: str, output: Path | None = None) -> Path:
    """Compile `folder`/operators.c with `more` flags too. Returns the library; raises CalledProcessError."""
    return _compiled(MODULE, [folder / "operators.c"], *more, output=output or _library(folder, MODULE))


def build_values(*more: str, output: Path | None = None) -> Path:
    """Compile the store client's C halves with `more` flags too. Returns the library; raises CalledProcessError."""
    sources = [ROOT / source for source in _declared(VALUES_MODULE)["sources"]]
    return _compiled(VALUES_MODULE, sources, *more, output=output or _library(ROOT / "kvstore", VALUES_MODULE))


def _declared(module: str) -> dict[str, list[str]]:
    """What pyproject.toml says of it."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return next(each for each in tool["setuptools"]["ext-modules"] if each["name"] == module)


def _library(folder: Path, module: str) -> Path:
    return folder / f"{module.rpartition('.')[2]}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _compiled(module: str, sources: Sequence[Path], *more: str, output: Path) -> Path:
    cc = compiler()
    assert cc is not None, "there is no C compiler"
    fresh = output.with_suffix(".new")
    flags = [*_declared(module)["extra-compile-args"], *more, "-shared", "-fPIC"]
    subprocess.run([cc, *flags, "-o", str(fresh), *map(str, sources), "-lm"], check=True)
    fresh.replace(output)
    return output


if __name__ == "__main__":
    sys.stdout.write(f"{build(ROOT / 'kernels' / 'native')}\n{build_values()}\n")
