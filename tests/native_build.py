"""Builds the CPU's operators beside their sources, as installing does: `python -m tests.native_build`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULE = "whalepod.kernels.native._operators"


def compiler() -> str | None:
    return shutil.which("cc")


def compile_flags() -> list[str]:
    """Those of pyproject.toml."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    return next(module for module in tool["setuptools"]["ext-modules"] if module["name"] == MODULE)[
        "extra-compile-args"
    ]


def build(folder: Path, *more: str, output: Path | None = None) -> Path:
    """Compile `folder`/operators.c with `more` flags too. Returns the library; raises CalledProcessError."""
    cc = compiler()
    assert cc is not None, "there is no C compiler"
    library = output or folder / f"_operators{sysconfig.get_config_var('EXT_SUFFIX')}"
    fresh = library.with_suffix(".new")
    command = [cc, *compile_flags(), *more, "-shared", "-fPIC", "-o", str(fresh), str(folder / "operators.c"), "-lm"]
    subprocess.run(command, check=True)
    fresh.replace(library)
    return library


if __name__ == "__main__":
    sys.stdout.write(f"{build(ROOT / 'kernels' / 'native')}\n")
