"""The house's rules hold in every module, and each rule is caught breaking."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

from tests.conftest import ROOT_NAMES, modules_under_root_names
from tests.house_rules import (
    CODE_FOLDERS,
    FILE_LINES_MAX,
    FUNCTION_LINES_MAX,
    PRODUCT_FOLDERS,
    ROOT,
    RULES,
    Source,
    allowed_imports,
    banned_names,
    environment_reads,
    far_names_for_near_modules,
    long_code,
    machine_paths,
    prints,
    read_sources,
    sleeps_outside_loops,
    unseeded_randomness,
    wall_clocks,
    wrong_imports,
)

ALLOWED = allowed_imports((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sources() -> tuple[Source, ...]:
    found = read_sources()
    assert len(found) > 20, "the rules must have read the code"
    return found


def assert_nothing(broken: Iterator[str]) -> None:
    if report := "\n".join(broken):
        pytest.fail(report, pytrace=False)


# --------------------------------------------------------------------------------------------- the rules hold


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Callable[[Source], Iterator[str]], sources: tuple[Source, ...]) -> None:
    assert_nothing(line for source in sources for line in rule(source))


def test_imports_point_down_as_the_architecture_page_says(sources: tuple[Source, ...]) -> None:
    assert_nothing(line for source in sources for line in wrong_imports(source, ALLOWED))


def test_the_architecture_page_has_a_row_for_every_folder() -> None:
    assert set(ALLOWED) == set(PRODUCT_FOLDERS)


def test_the_architecture_page_allows_no_cycle() -> None:
    order = ("core", "kernels", "model", "training", "kvstore", "engine", "cluster", "services", "cli")
    for folder, allowed in ALLOWED.items():
        below = set(order[: order.index(folder) + 1]) | {"rpc"}
        assert allowed <= below, f"{folder} may import {sorted(allowed - below)}, which lies above it"


def test_no_root_folder_is_a_package_of_its_own() -> None:
    assert not [folder for folder in (*CODE_FOLDERS, "proto", "deploy") if (ROOT / folder / "__init__.py").exists()]


def test_every_product_folder_is_linked_under_the_import_root_and_type_checked() -> None:
    links = {path.name: path for path in (ROOT / "src/whalepod").iterdir() if path.is_symlink()}
    assert set(links) == {*PRODUCT_FOLDERS, "models"}, "models/ holds files, no code"
    for name, link in links.items():
        assert str(link.readlink()) == f"../../{name}", "links are relative, so that a clone works anywhere"
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pyright"]["include"]
    assert {f"src/whalepod/{name}" for name in PRODUCT_FOLDERS} <= set(checked)


def test_no_committed_text_names_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, timeout=30)
    if listed.returncode:
        pytest.skip("not a git checkout")
    broken: list[str] = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".sh", ""):
            broken += machine_paths(path.read_text(encoding="utf-8", errors="replace"), name)
    assert_nothing(iter(broken))


# --------------------------------------------------------------------------------- planted violations are caught


def planted(text: str, path: str = "engine/planted.py") -> Source:
    return Source(PurePosixPath(path), text)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "from whalepod.kernels.attention import reference"),
        ("kernels/gather/reference.py", "import whalepod.model.config"),
        ("kvstore/x.py", "from whalepod import engine"),
        ("engine/x.py", "def f():\n    from whalepod.cluster import registry"),
        ("engine/x.py", "from whalepod.rpc.kv.v1 import kv_pb2"),
        ("cluster/x.py", "from whalepod.services.router import app"),
        ("services/router/x.py", "from whalepod.services.decode import servicer"),
        ("services/router/x.py", "from whalepod import services"),
        ("services/router/x.py", "from ..decode import servicer"),
        ("model/x.py", "import kernels.attention"),
        ("model/x.py", "from core import ids"),
    ],
)
def test_an_import_in_the_wrong_direction_is_caught(path: str, text: str) -> None:
    assert list(wrong_imports(planted(text, path), ALLOWED))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "import hashlib\nfrom .ids import RequestId"),
        ("kernels/gather/reference.py", "from whalepod.core.errors import ConfigError"),
        ("services/router/x.py", "from whalepod.engine.interface import EngineRequest\nfrom .placement import place"),
        ("services/router/x.py", "from whalepod.rpc.kv.v1 import kv_pb2\nfrom whalepod import __version__"),
        ("cli/x.py", "from whalepod.services.router import app"),
    ],
)
def test_an_import_in_the_right_direction_is_allowed(path: str, text: str) -> None:
    assert not list(wrong_imports(planted(text, path), ALLOWED))


LONG_FUNCTION = "def f() -> None:\n" + "    pass\n" * FUNCTION_LINES_MAX
JIT = "import triton\n\n@triton.jit\n"
LONG_FILE = "x = 1\n" * (FILE_LINES_MAX + 1)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (far_names_for_near_modules, planted("from whalepod.engine.interface import EngineRequest")),
        (
            far_names_for_near_modules,
            planted("from whalepod.kernels.rope import reference", "kernels/rope/x.py"),
        ),
        (banned_names, planted("", "engine/utils.py")),
        (banned_names, planted("", "model/helpers/rope.py")),
        (banned_names, planted("class CacheManager: ...")),
        (long_code, planted(LONG_FUNCTION)),
        (long_code, planted(LONG_FUNCTION, "kernels/gather/triton_kernel.py")),
        (long_code, planted(JIT + LONG_FUNCTION)),
        (long_code, planted(LONG_FILE)),
        (wall_clocks, planted("import time\ntime.time()")),
        (wall_clocks, planted("import time as t\nnow = t.monotonic")),
        (wall_clocks, planted("from time import perf_counter_ns as tick\ntick()")),
        (wall_clocks, planted("from datetime import datetime\ndatetime.now()")),
        (wall_clocks, planted("import asyncio\nasyncio.get_running_loop().time()")),
        (wall_clocks, planted("import time\ntime.monotonic()", "tests/engine/test_x.py")),
        (wall_clocks, planted("import time\ntime.time()", "benchmarks/x.py")),
        (sleeps_outside_loops, planted("import time\ntime.sleep(1)", "tests/engine/test_x.py")),
        (unseeded_randomness, planted("import random\nrandom.random()")),
        (unseeded_randomness, planted("import random\nrandom.Random()")),
        (unseeded_randomness, planted("from random import choice\nchoice([1])")),
        (unseeded_randomness, planted("import numpy as np\nnp.random.default_rng()")),
        (unseeded_randomness, planted("import numpy as np\nnp.random.rand(3)")),
        (unseeded_randomness, planted("import secrets\nsecrets.token_bytes(16)")),
        (unseeded_randomness, planted("from uuid import uuid4\nuuid4()")),
        (unseeded_randomness, planted("import os\nos.urandom(8)")),
        (unseeded_randomness, planted("import torch\ntorch.randn(3)")),
        (unseeded_randomness, planted("import torch\ntorch.empty(3).normal_()")),
        (unseeded_randomness, planted("import torch\ntorch.manual_seed(0)\ntorch.randn(3)")),
        (unseeded_randomness, planted("import torch\ntorch.randn(3)", "tests/engine/test_x.py")),
        (prints, planted("print('hello')")),
        (environment_reads, planted("import os\nos.environ['HOME']")),
        (environment_reads, planted("from os import environ\nhome = environ.get('HOME')")),
        (environment_reads, planted("import os\nos.getenv('HOME')")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_violation_is_caught(rule: Callable[[Source], Iterator[str]], source: Source) -> None:
    assert list(rule(source))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (far_names_for_near_modules, planted("from .interface import EngineRequest\nimport whalepod.core.ids")),
        (far_names_for_near_modules, planted("from whalepod.kernels.quantise import FP8", "kernels/rope/reference.py")),
        (far_names_for_near_modules, planted("from whalepod.engine.interface import X", "tests/engine/test_x.py")),
        (wall_clocks, planted("import time\ntime.monotonic()", "core/clock.py")),
        (wall_clocks, planted("import time\ntime.perf_counter()", "benchmarks/x.py")),
        (wall_clocks, planted("def f(clock):\n    return clock.monotonic_s()")),
        (sleeps_outside_loops, planted("import time\nwhile not ready():\n    time.sleep(0.01)")),
        (unseeded_randomness, planted("import secrets\nsecrets.token_bytes(16)", "core/ids.py")),
        (unseeded_randomness, planted("import random\nrandom.Random(7).random()")),
        (unseeded_randomness, planted("import numpy as np\nnp.random.default_rng(7).normal()")),
        (unseeded_randomness, planted("import torch\ntorch.randn(3, generator=torch.Generator().manual_seed(7))")),
        (unseeded_randomness, planted("import torch\ntorch.manual_seed(0)\ntorch.randn(3)", "tests/test_x.py")),
        (prints, planted("print('hello')", "benchmarks/x.py")),
        (environment_reads, planted("import os\nos.environ['A'] = '1'\nos.environ.setdefault('B', '2')")),
        (environment_reads, planted("import os\nos.environ['HOME']", "services/router/main.py")),
        (long_code, planted(JIT + LONG_FUNCTION, "kernels/gather/triton_kernel.py")),
        (long_code, planted("def f() -> None:\n" + "    pass\n" * (FUNCTION_LINES_MAX - 1))),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_rules_allow_is_allowed(rule: Callable[[Source], Iterator[str]], source: Source) -> None:
    assert not list(rule(source))


def test_a_planted_machine_path_is_caught() -> None:
    assert list(machine_paths("model = '/" + "root/checkpoints'", "docs/x.md"))
    assert not list(
        machine_paths("see https://example.org/home/page and ${HOME}/home/x and /etc/whalepod", "docs/x.md")
    )


# ------------------------------------------------------------------------------------- root folders as modules


def test_a_root_folder_that_became_a_module_is_noticed() -> None:
    ours = ModuleType("kernels")
    ours.__path__ = [str(ROOT / "kernels")]
    theirs = ModuleType("proto")
    theirs.__path__ = [str(ROOT / ".venv/lib/site-packages/proto")]
    assert modules_under_root_names({"kernels": ours, "proto": theirs, "json": ModuleType("json")}) == ["kernels"]


@pytest.mark.parametrize(("body", "code"), [("import kernels", 1), ("import whalepod.core.clock", 0)])
def test_a_run_that_imports_a_root_folder_fails_at_its_end(tmp_path: Path, body: str, code: int) -> None:
    planted_test = tmp_path / "test_planted.py"
    planted_test.write_text(f"def test_passes():\n    {body}\n", encoding="utf-8")
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.conftest",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            planted_test,
        ],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == code, run.stdout.decode() + run.stderr.decode()
    assert b"1 passed" in run.stdout


def test_every_folder_of_the_repository_is_watched() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    unwatched = {"tests", "src", "docs", "models", "build", "dist"}
    assert {name for name in folders if not name.endswith(".egg-info")} - unwatched <= set(ROOT_NAMES)
