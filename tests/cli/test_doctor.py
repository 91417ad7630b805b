"""The doctor finds what is wrong, says how to fix it, and its exit code tells."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from whalepod.cli import doctor
from whalepod.cli.doctor import Finding, Verdict
from whalepod.cli.main import main
from whalepod.cli.user_dirs import state_dir
from whalepod.cluster.config import ClusterConfig, EngineSettings, RouterSettings
from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from whalepod.cluster.pool_settings import DecodeSettings, PrefillSettings
from whalepod.cluster.serve_lock import ServeLock


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def verdicts(check: Callable[[ClusterConfig], Iterator[Finding]], config: ClusterConfig | None = None) -> list[Verdict]:
    return [finding.verdict for finding in check(config or ClusterConfig())]


def failures(check: Callable[[ClusterConfig], Iterator[Finding]], config: ClusterConfig | None = None) -> list[Finding]:
    return [finding for finding in check(config or ClusterConfig()) if finding.verdict is Verdict.FAILURE]


def test_this_machine_can_run_the_tests() -> None:
    for check in (doctor.check_python, doctor.check_packages, doctor.check_torch, doctor.check_redis):
        assert failures(check) == []


def test_a_port_that_is_taken_is_named_with_the_flag_that_moves_it(busy_port: int) -> None:
    finding = failures(doctor.check_ports, ClusterConfig(router=RouterSettings(http_port=busy_port)))[0]
    assert str(busy_port) in finding.text
    assert "--http-port" in finding.fix


def test_ports_of_the_cluster_that_serves_here_are_not_taken_by_others(
    busy_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = ClusterConfig(router=RouterSettings(http_port=busy_port))
    lock = ServeLock(state_dir(), busy_port)
    lock.acquire()
    lock.publish(http_url=f"http://127.0.0.1:{busy_port}", config_file=tmp_path / "cluster.yaml")
    assert failures(doctor.check_ports, config) == []
    lock.release()
    assert failures(doctor.check_ports, config)


def test_a_taken_port_of_a_later_rank_is_found_too(busy_port: int) -> None:
    config = ClusterConfig(decode=DecodeSettings(replicas=2, port=busy_port - 1))
    assert any("decode.port + 1" in finding.text for finding in failures(doctor.check_ports, config))


def test_a_host_that_is_not_this_machine_is_a_failure() -> None:
    assert failures(doctor.check_ports, ClusterConfig(host="192.0.2.1"))


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["numpy>=2", "not-a-package>=1 ; python_version > '3'", 'pytest ; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: declared)
    (finding,) = failures(doctor.check_packages)
    assert finding.text == "missing: not-a-package"


def test_more_threads_than_cores_is_a_warning_and_not_a_failure() -> None:
    config = ClusterConfig(engine=EngineSettings(threads=1000), prefill=PrefillSettings(replicas=2))
    assert verdicts(doctor.check_torch, config) == [Verdict.OK, Verdict.WARNING]


def test_memory_for_more_ranks_than_fit_is_a_warning() -> None:
    config = ClusterConfig(decode=DecodeSettings(replicas=500))
    assert Verdict.WARNING in verdicts(doctor.check_memory, config)


@pytest.mark.parametrize(
    ("variable", "verdict", "text"),
    [
        (None, Verdict.OK, "3 of 3 GPUs are visible: 0, 1, 2"),
        ("2,GPU-aa", Verdict.WARNING, "1 of 3 GPUs are visible: 2: CUDA_VISIBLE_DEVICES=2,GPU-aa ends"),
        ("GPU-cc,GPU-aa", Verdict.OK, "2 of 3 GPUs are visible: 2, 0"),
        ("-1", Verdict.WARNING, "0 of 3 GPUs are visible: none"),
        ("", Verdict.OK, "0 of 3 GPUs are visible: none"),
        ("1,1", Verdict.FAILURE, "names device 1 twice"),
    ],
)
def test_what_is_visible_of_the_gpus_is_what_cuda_makes_of_the_variable(
    variable: str | None, verdict: Verdict, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, uuid in (("0000:1a:00.0", "aa11"), ("0000:3b:00.0", "bb22"), ("0000:5e:00.0", "cc33")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "information").write_text(f"Model: \t NVIDIA H200\nGPU UUID: \t GPU-{uuid}\n")
    monkeypatch.setattr(doctor, "DRIVER_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    (finding,) = doctor.check_visible_gpus(ClusterConfig())
    assert finding.verdict is verdict
    assert text in finding.text
    monkeypatch.setattr(doctor, "DRIVER_GPUS", tmp_path / "none")
    assert list(doctor.check_visible_gpus(ClusterConfig())) == []


def test_a_redis_that_does_not_answer_is_a_failure() -> None:
    config = ClusterConfig(redis_url=f"redis://127.0.0.1:{unused_port()}")
    (finding,) = failures(doctor.check_redis, config)
    assert "redis_url" in finding.fix


def test_a_redis_that_answers_tells_its_version() -> None:
    port = unused_port()
    with EmbeddedRedis(EmbeddedRedisSettings(port=port)):
        (finding,) = doctor.check_redis(ClusterConfig(redis_url=f"redis://127.0.0.1:{port}"))
    assert finding.verdict is Verdict.OK
    assert finding.text.endswith("answers at redis_url")


def test_a_directory_without_a_checkpoint_is_a_failure(tmp_path: Path) -> None:
    assert failures(doctor.check_model, ClusterConfig(model=str(tmp_path)))
    assert failures(doctor.check_model) == []


def test_whatever_is_wrong_comes_with_a_fix(busy_port: int, tmp_path: Path) -> None:
    config = ClusterConfig(
        model=str(tmp_path),
        redis_url=f"redis://127.0.0.1:{unused_port()}",
        router=RouterSettings(http_port=busy_port),
        engine=EngineSettings(threads=1000),
        decode=DecodeSettings(replicas=500),
    )
    wrong = [finding for check in doctor.CHECKS for finding in check(config) if finding.verdict is not Verdict.OK]
    assert len(wrong) >= 5
    assert all(finding.fix for finding in wrong)


def test_the_command_fails_exactly_when_something_is_wrong(busy_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--http-port", str(busy_port)])
    assert stopped.value.code == 1
    assert f"{busy_port} (http_port) is taken" in capsys.readouterr().out
