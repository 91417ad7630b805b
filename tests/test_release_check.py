"""What a release must agree on is noticed when it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.house_rules import ROOT
from tests.release_check import (
    failing,
    gates,
    locked_versions,
    other_versions,
    undated,
    unlocked,
    write_sbom,
)
from whalepod import __version__


def test_another_version_than_the_chart_the_images_and_the_changelog_have_is_noticed() -> None:
    lines = list(other_versions(ROOT, "9.9.9"))
    for name in ("CHANGELOG.md", "Chart.yaml: version", "Chart.yaml: appVersion", "Dockerfile.cpu", "compose.yaml"):
        assert any(line.startswith(name) for line in lines), name


def test_at_any_commit_nothing_but_the_moment_of_a_release_stands_in_its_way() -> None:
    quick = {"versions", "lock", "environment", "generated files"}
    found = [gate for gate in gates() if gate.name in quick]
    assert len(found) == len(quick)
    assert [sentence for gate in found for sentence in gate.wrong()] == []
    assert {gate.name for gate in gates() if gate.at_release} == {"date", "tree", "tag"}


@pytest.mark.parametrize(("heading", "count"), [(f"{__version__} (unreleased)", 1), (f"{__version__} (2027-01-31)", 0)])
def test_a_version_without_a_date_is_noticed(tmp_path: Path, heading: str, count: int) -> None:
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 0.0.1 (unreleased)\n")
    assert len(list(undated(tmp_path, __version__))) == count


def test_a_lock_file_that_lags_behind_is_noticed(tmp_path: Path) -> None:
    project = (
        '[project]\ndependencies = ["Numpy>=2", "torch>=3", "unheard-of"]\noptional-dependencies = {dev = ["ruff"]}\n'
    )
    (tmp_path / "pyproject.toml").write_text(project)
    (tmp_path / "constraints.txt").write_text("numpy==2.1.0\nruff==1.0\ntorch==2.13.0 ; sys_platform == 'linux'\n")
    assert [line.split()[2] for line in unlocked(tmp_path)] == ["torch", "unheard-of"]


def test_a_command_that_fails_is_named_with_what_it_said_last() -> None:
    assert list(failing(sys.executable, "-c", "")) == []
    (line,) = failing(sys.executable, "-c", "print('first'); raise SystemExit('a reason')")
    assert line.endswith("fails: first | a reason")


def test_the_list_of_components_names_what_is_installed(tmp_path: Path) -> None:
    count = write_sbom(tmp_path / "sbom.json")
    listed = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))["components"]
    assert len(listed) == count > 50
    by_name = {each["name"]: each for each in listed}
    assert by_name["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert "licenses" in by_name["grpcio"]
    assert set(by_name) <= set(locked_versions(ROOT))
