"""What every test run shares: one thread of arithmetic, fixed examples, and a last look at what was imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from types import ModuleType

# Before torch is imported, here and in the processes that tests start: two cores are shared by everything.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
ROOT_NAMES = (
    "benchmarks", "cli", "cluster", "core", "deploy", "engine", "examples", "kernels", "kvstore", "model", "proto",
    "services", "training",
)  # fmt: skip

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, max_examples=60)
hypothesis.settings.load_profile("fixed")


def modules_under_root_names(modules: Mapping[str, ModuleType]) -> list[str]:
    """Names of the repository's folders that were imported as packages of their own, not as `whalepod.…`.

    Other people's packages of the same name, which lie elsewhere, are theirs to import.
    """
    return [name for name in ROOT_NAMES if name in modules and ROOT / name in _locations(modules[name])]


def _locations(module: ModuleType) -> set[Path]:
    return {Path(location).resolve() for location in getattr(module, "__path__", [])}


@pytest.fixture(params=["reference", "operators"])
def arithmetic(request: pytest.FixtureRequest) -> Generator[str]:
    """Both arithmetics of a CPU, one after the other: the references, the compiled operators."""
    from whalepod.kernels.native import library

    if request.param == "operators" and not library.available():
        pytest.skip(f"no compiled operators: {library.REASON_MISSING}")
    with library.chosen(wanted=request.param == "operators"):
        yield request.param


def pytest_sessionfinish(session: pytest.Session) -> None:
    intruders = modules_under_root_names(sys.modules)
    if intruders and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if intruders:
        sys.stderr.write(f"\nroot folders were imported by their own names: {', '.join(intruders)}\n")
