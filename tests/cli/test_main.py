"""The `whalepod` command: its list is quick, its exit codes are 0, 1 and 2, its log flags stand anywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

from whalepod import __version__
from whalepod.cli import main as cli
from whalepod.cli.main import COMMANDS, CommandEntry, hoist_log_flags, load_command, main
from whalepod.core.errors import CheckpointError, ConfigError


def exit_code(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


@pytest.fixture
def planted_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`whalepod planted MODE`, which lives in this module."""
    monkeypatch.setattr(CommandEntry, "import_name", __name__)
    monkeypatch.setattr(cli, "COMMANDS", {"planted": CommandEntry("planted", "planted", "Does what it is told.")})


def planted(mode: str) -> None:
    match mode:
        case "config":
            raise ConfigError("blocks and memory_gib are both set")
        case "checkpoint":
            raise CheckpointError("tensor head.weight is missing")
        case "bug":
            raise ZeroDivisionError("divided by nothing")
        case _:
            return


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_list_is_there_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_command(name).help
    assert exit_code(name, "--help") == 0
    assert f"whalepod {name}" in capsys.readouterr().out


def test_the_list_of_commands_imports_none_of_them() -> None:
    heavy = ("torch", "ray", "grpc", "fastapi", "numpy", "pydantic")
    program = (
        "import sys; from whalepod.cli.main import main\n"
        "try: main(['--help'])\n"
        f"except SystemExit as stop: sys.exit(stop.code or ','.join(m for m in {heavy} if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert all(name in run.stdout for name in COMMANDS)


def test_python_dash_m_is_the_same_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "whalepod", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout.strip()) == (0, f"whalepod {__version__}")


@pytest.mark.usefixtures("planted_command")
@pytest.mark.parametrize(("mode", "code"), [("fine", 0), ("bug", 1), ("checkpoint", 1), ("config", 2)])
def test_the_exit_code_says_whether_it_failed_or_was_used_wrongly(mode: str, code: int) -> None:
    assert exit_code("planted", mode) == code


@pytest.mark.usefixtures("planted_command")
def test_a_refused_setting_is_one_sentence_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code("planted", "config")
    assert capsys.readouterr().err == "whalepod: blocks and memory_gib are both set\n"


@pytest.mark.parametrize("arguments", [["serv"], ["--log-level", "loud", "doctor"], ["doctor", "--nonsense"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    assert exit_code(*arguments) == 2


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code("doctr")
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("serve --log-json --http-port 9000", "--log-json serve --http-port 9000"),
        ("serve --log-level debug", "--log-level debug serve"),
        ("serve --log-level=debug x", "--log-level=debug serve x"),
        ("--log-json serve", "--log-json serve"),
        ("generate -- --log-json", "generate -- --log-json"),
        ("serve --log-level", "--log-level serve"),
    ],
)
def test_log_flags_may_follow_the_command(typed: str, read: str) -> None:
    assert hoist_log_flags(typed.split()) == read.split()
