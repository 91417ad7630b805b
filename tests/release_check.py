"""`make release-check`: what must hold before a version is published, and the list of what it is made of.

A line for each gate: ok, or each thing that is wrong. Some gates can hold for the very commit of a release only (its
date, its tag); with `--dry-run`, for any other commit, they are told as `later` and do not count. Writes
`build/sbom.json` (CycloneDX: every locked package that is installed, with version and licence) and prints last one JSON
object: version, gates, wrong, later, components.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console

from tests.deploy.generated_files import generated_files
from tests.docs_tables import tables, with_table
from tests.house_rules import ROOT
from whalepod import __version__

SBOM = ROOT / "build/sbom.json"
UNRELEASED = "(unreleased)"
COMMAND_S = 1800


@dataclass(frozen=True, slots=True)
class Gate:
    name: str
    wrong: Callable[[], Iterator[str]]
    """A sentence for each thing that is wrong."""
    at_release: bool = False
    """Holds for the commit of a release alone."""


def gates(*, version: str = __version__, root: Path = ROOT) -> list[Gate]:
    """The quick ones first."""
    python = (sys.executable, "-m")
    return [
        Gate("date", lambda: undated(root, version), at_release=True),
        Gate("tree", changed, at_release=True),
        Gate("tag", lambda: tagged(version), at_release=True),
        Gate("versions", lambda: other_versions(root, version)),
        Gate("lock", lambda: unlocked(root)),
        Gate("environment", other_installed),
        Gate("generated files", not_generated),
        Gate("generated code", lambda: failing("make", "--silent", "--old-file=venv", "proto-check")),
        Gate("format", lambda: failing(*python, "ruff", "format", "--check", ".")),
        Gate("lint", lambda: failing(*python, "ruff", "check", ".")),
        Gate("chart", lambda: failing(*python, "tests.deploy.chart_check")),
        Gate("package", lambda: failing(*python, "pytest", "-q", "-m", "", "tests/test_packaging.py")),
        Gate("types", lambda: failing(*python, "pyright")),
    ]


def undated(root: Path, version: str) -> Iterator[str]:
    heading = _newest_heading(root)
    if heading.startswith(version) and UNRELEASED in heading:
        yield f"CHANGELOG.md says that {version} is unreleased: write its date"


def changed() -> Iterator[str]:
    if lines := _git("status", "--porcelain").splitlines():
        yield f"the working tree has changes: {lines[0].strip()} …"


def tagged(version: str) -> Iterator[str]:
    if f"v{version}" in _git("tag", "--list").split():
        yield f"v{version} is tagged already: a published version does not change"


def other_versions(root: Path, version: str) -> Iterator[str]:
    heading = _newest_heading(root)
    if heading.split()[:1] != [version]:
        yield f"CHANGELOG.md begins with {heading or 'nothing'}, not with {version}"
    chart = yaml.safe_load((root / "deploy/k8s/whalepod/Chart.yaml").read_text(encoding="utf-8"))
    for key in ("version", "appVersion"):
        if chart[key] != version:
            yield f"Chart.yaml: {key} is {chart[key]}, the package's version {version}"
    for name in ("Dockerfile.cpu", "Dockerfile.cuda", "compose.yaml"):
        text = (root / "deploy/docker" / name).read_text(encoding="utf-8")
        told = set(re.findall(r"whalepod:(\d+\.\d+\.\d+)|image\.version=\"(\d+\.\d+\.\d+)", text))
        if {first or second for first, second in told} != {version}:
            yield f"{name} names another version than {version}"


def unlocked(root: Path) -> Iterator[str]:
    """What pyproject.toml asks for and constraints.txt does not give."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in (*project["dependencies"], *chain(*project["optional-dependencies"].values())):
        wanted = Requirement(text)
        given = [version for name, version, _ in locked_lines(root) if name == canonicalize_name(wanted.name)]
        if not given or not all(wanted.specifier.contains(version, prereleases=True) for version in given):
            yield f"constraints.txt has {wanted.name} {' '.join(given)}, pyproject.toml wants {text}: run `make lock`"


def other_installed() -> Iterator[str]:
    """What the checks run with is not what is published."""
    for name, version in locked_versions(ROOT).items():
        installed = _installed(name)
        if installed is not None and Version(installed).public != version:
            yield f"{name} {installed} is installed, {version} is locked: run `make venv`"


def not_generated() -> Iterator[str]:
    for path, (name, table) in tables().items():
        page = path.read_text(encoding="utf-8")
        if with_table(page, name, table) != page:
            yield f"{path.name} is not what the code says: run `make docs`"
    for path, content in generated_files().items():
        if path.read_text(encoding="utf-8") != content:
            yield f"{path.name} is not what the code makes: run `make docs`"


def failing(*command: str) -> Iterator[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        yield f"`{' '.join(command)}` fails: {' | '.join(lines[-3:])}"


def locked_lines(root: Path) -> Iterator[tuple[str, str, Marker | None]]:
    """Canonical name, version, and which systems and Pythons the line is for."""
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.lstrip().startswith("#"):
            locked = Requirement(line)
            yield canonicalize_name(locked.name), next(iter(locked.specifier)).version, locked.marker


def locked_versions(root: Path) -> Mapping[str, str]:
    """For this system and this Python, by canonical name."""
    return {name: version for name, version, marker in locked_lines(root) if marker is None or marker.evaluate()}


def components() -> list[dict[str, Any]]:
    """Locked packages that are installed here, as CycloneDX names them. Others are for other systems, or for extras."""
    found: list[dict[str, Any]] = []
    for name, version in locked_versions(ROOT).items():
        if _installed(name) is None:
            continue
        told: Any = importlib.metadata.metadata(name)
        licence = told.get("License-Expression") or told.get("License") or ""
        component: dict[str, Any] = {"type": "library", "name": name, "version": version}
        component["purl"] = f"pkg:pypi/{name}@{version}"
        if licence and "\n" not in licence:
            component["licenses"] = [{"license": {"name": licence}}]
        found.append(component)
    return found


def write_sbom(path: Path = SBOM) -> int:
    """How many components it lists."""
    listed = components()
    own = {"type": "application", "name": "whalepod", "version": __version__}
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": own}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**document, "components": listed}, indent=1) + "\n", encoding="utf-8")
    return len(listed)


def _newest_heading(root: Path) -> str:
    found = re.search(r"^## (.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return "" if found is None else found[1]


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="for a commit that is not released")
    asked = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    found, counts = gates(), {"wrong": 0, "later": 0}
    for gate in found:
        sentences = list(gate.wrong())
        told = "later" if asked.dry_run and gate.at_release else "wrong"
        if not sentences:
            console.print(f"ok     {gate.name}")
        for sentence in sentences:
            console.print(f"{told}  {gate.name}: {sentence}", markup=False)
        counts[told] += bool(sentences)
    console.print(json.dumps({"version": __version__, "gates": len(found), **counts, "components": write_sbom()}))
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
