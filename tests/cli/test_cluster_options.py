"""A command gets every setting as a flag, and one validated config."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from whalepod.cli.cluster_options import FINDING, with_cluster_config, with_known_cluster
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import settings
from whalepod.core.errors import ConfigError

SEEN: list[tuple[ClusterConfig, int]] = []


@with_cluster_config
def command(config: ClusterConfig, index: int = 7) -> None:
    """Do a thing."""
    SEEN.append((config, index))


def run(*arguments: str, variables: dict[str, str] | None = None) -> tuple[ClusterConfig, int]:
    app = typer.Typer()

    @app.callback()
    def root(log_level: str = "info", log_json: bool = False) -> None:
        """As in `cli/main.py`."""

    app.command(name="command")(command)
    SEEN.clear()
    words = list(arguments)
    front = [word for word in words if word.startswith("--log-level")]
    rest = [word for word in words if not word.startswith("--log-level")]
    result = CliRunner().invoke(app, [*front, "command", *rest], env=variables, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return SEEN[0]


def test_flags_switches_variables_and_the_commands_own_options_arrive(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("prefill: {slots: 5}\n", encoding="utf-8")
    config, index = run(
        "--config", str(file), "--decode-slots", "3", "--trust-tenant-header", "--index", "9",
        variables={"WHALEPOD_QUEUE_SIZE": "11"},
    )  # fmt: skip
    assert (config.decode.slots, config.prefill.slots, config.router.queue_size) == (3, 5, 11)
    assert config.router.trust_tenant_header
    assert index == 9


def test_a_switch_can_be_turned_off_against_a_variable() -> None:
    config, _ = run("--no-trust-tenant-header", variables={"WHALEPOD_TRUST_TENANT_HEADER": "true"})
    assert not config.router.trust_tenant_header


def test_what_is_not_given_has_its_default() -> None:
    assert run()[0] == ClusterConfig()
    assert run()[1] == 7


def test_the_log_level_of_the_whole_command_is_a_setting_too() -> None:
    assert run("--log-level=error")[0].log_level == "error"
    assert run(variables={"WHALEPOD_LOG_LEVEL": "debug"})[0].log_level == "debug"


def test_a_bad_value_is_refused_with_the_name_of_its_flag() -> None:
    with pytest.raises(ConfigError, match="--decode-slots"):
        run("--decode-slots", "many")


def test_a_command_that_looks_at_a_cluster_lists_few_settings_and_takes_all() -> None:
    @with_known_cluster
    def look(config: ClusterConfig) -> None:
        SEEN.append((config, 0))

    app = typer.Typer()
    app.command()(look)
    page = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    listed = {setting.key for setting in settings() if f"{setting.flag} " in page}
    assert listed == set(FINDING)
    assert "serve --help" in page
    assert CliRunner().invoke(app, ["--decode-slots", "3"], catch_exceptions=False).exit_code == 0
    assert SEEN[-1][0].decode.slots == 3
