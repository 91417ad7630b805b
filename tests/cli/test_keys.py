"""`whalepod keys`: a key is printed once, shown by name, and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalepod.cli.main import main
from whalepod.cluster.api_keys import hash_of_key, read_api_keys


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(["keys", *arguments])
    return stopped.value.code


def test_a_key_is_made_listed_and_taken_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    assert run("add", "ci", "--file", str(file), "--tenant", "acme", "--admin", "--expires", "2020-01-31") == 0
    key = capsys.readouterr().out.strip()
    assert read_api_keys(file)[hash_of_key(key)].scopes == {"admin", "generate"}
    assert run("list", "--file", str(file)) == 0
    shown = capsys.readouterr().out
    assert "acme" in shown
    assert "2020-01-31 (expired)" in shown
    assert key not in shown
    assert run("remove", "ci", "--file", str(file)) == 0
    assert read_api_keys(file) == {}


@pytest.mark.parametrize(
    "arguments", [("add", "ci", "--tenant", "a", "--expires", "soon"), ("remove", "nobody"), ("list",)]
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(*arguments, "--file", str(tmp_path / "keys.yaml")) == 2
    assert "whalepod: " in capsys.readouterr().err
