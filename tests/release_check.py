"""`make release-check`: what must agree before a version is published, and the list of what it is made of.

Prints a line for each thing that is wrong, writes `build/sbom.json` (CycloneDX: every locked package that is installed,
with version and licence) and prints last one JSON object: version, components, wrong.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from tests.deploy.generated_files import generated_files
from tests.docs_tables import tables, with_table
from tests.house_rules import ROOT
from whalepod import __version__

SBOM = ROOT / "build/sbom.json"
UNRELEASED = "(unreleased)"


def wrong_things(*, version: str = __version__, root: Path = ROOT) -> Iterator[str]:
    """A sentence for each."""
    yield from _changelog(root, version)
    yield from _versions(root, version)
    for path, (name, table) in tables().items():
        page = path.read_text(encoding="utf-8")
        if with_table(page, name, table) != page:
            yield f"{path.name} is not what the code says: run `make docs`"
    for path, content in generated_files().items():
        if path.read_text(encoding="utf-8") != content:
            yield f"{path.name} is not what the code makes: run `make docs`"
    if changed := _git("status", "--porcelain"):
        yield f"the working tree has changes: {changed.splitlines()[0].strip()} …"
    if f"v{version}" in _git("tag", "--list").split():
        yield f"v{version} is tagged already: a published version does not change"


def _changelog(root: Path, version: str) -> Iterator[str]:
    headings = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    if not headings or headings[0].split()[0] != version:
        yield f"CHANGELOG.md begins with {headings[:1]}, not with {version}"
    elif UNRELEASED in headings[0]:
        yield f"CHANGELOG.md says that {version} is unreleased: write its date"


def _versions(root: Path, version: str) -> Iterator[str]:
    chart = yaml.safe_load((root / "deploy/k8s/whalepod/Chart.yaml").read_text(encoding="utf-8"))
    for key in ("version", "appVersion"):
        if chart[key] != version:
            yield f"Chart.yaml: {key} is {chart[key]}, the package's version {version}"
    for name in ("Dockerfile.cpu", "Dockerfile.cuda", "compose.yaml"):
        text = (root / "deploy/docker" / name).read_text(encoding="utf-8")
        told = set(re.findall(r"whalepod:(\d+\.\d+\.\d+)|image\.version=\"(\d+\.\d+\.\d+)", text))
        if {first or second for first, second in told} != {version}:
            yield f"{name} names another version than {version}"


def components() -> list[dict[str, Any]]:
    """Locked packages that are installed here, as CycloneDX names them."""
    found: list[dict[str, Any]] = []
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.match(r"([a-z0-9.-]+)==([^ ;]+)", line)
        if match is None:
            continue
        try:
            told: Any = importlib.metadata.metadata(match[1])
        except importlib.metadata.PackageNotFoundError:
            continue  # for another system, or for an extra that is not installed
        licence = told.get("License-Expression") or told.get("License") or ""
        component: dict[str, Any] = {"type": "library", "name": match[1], "version": match[2]}
        component["purl"] = f"pkg:pypi/{match[1]}@{match[2]}"
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


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30).stdout


def main() -> None:
    console = Console(highlight=False, soft_wrap=True)
    wrong = list(wrong_things())
    for line in wrong:
        console.print(line)
    console.print(json.dumps({"version": __version__, "components": write_sbom(), "wrong": len(wrong)}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
