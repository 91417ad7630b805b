"""What a release must agree on is noticed when it does not."""

from __future__ import annotations

import json
from pathlib import Path

from tests.release_check import UNRELEASED, write_sbom, wrong_things
from whalepod import __version__


def test_another_version_than_the_chart_the_images_and_the_changelog_have_is_noticed() -> None:
    lines = list(wrong_things(version="9.9.9"))
    for name in ("CHANGELOG.md", "Chart.yaml: version", "Chart.yaml: appVersion", "Dockerfile.cpu", "compose.yaml"):
        assert any(line.startswith(name) for line in lines), name


def test_now_nothing_but_the_date_and_local_changes_stand_in_the_way_of_a_release() -> None:
    allowed = ("the working tree has changes", f"CHANGELOG.md says that {__version__} is unreleased")
    assert [line for line in wrong_things() if not line.startswith(allowed)] == []
    assert UNRELEASED.strip("()") in allowed[1]


def test_the_list_of_components_names_what_is_installed(tmp_path: Path) -> None:
    count = write_sbom(tmp_path / "sbom.json")
    listed = json.loads((tmp_path / "sbom.json").read_text(encoding="utf-8"))["components"]
    assert len(listed) == count > 50
    by_name = {each["name"]: each for each in listed}
    assert by_name["torch"]["purl"].startswith("pkg:pypi/torch@")
    assert "licenses" in by_name["grpcio"]
