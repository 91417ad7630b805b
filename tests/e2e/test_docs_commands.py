"""The commands of the pages are run as they are printed, beside a cluster that serves; only addresses are its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs_blocks import Block, all_blocks, run_by_tests
from tests.e2e.served_cluster import ServedCluster, served_cluster
from tests.house_rules import ROOT
from tests.model.vision.pictures import encoded, noise
from tests.own_ports import with_own_ports
from whalepod.cluster.config import ClusterConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PYTHON = [block for block in all_blocks() if block.language == "python"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    flags = ("--log-level", "error")
    with served_cluster(tmp_path_factory.mktemp("serve"), *flags, shipped_model=True) as served:
        yield served


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Like the root of the repository; what commands write stays here."""
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    if not (tmp_path / ".venv").exists():
        (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    (tmp_path / "picture.png").write_bytes(encoded(noise(96, 64), "PNG"))
    return tmp_path


def run(block: Block, words: list[str], cluster: ServedCluster, workplace: Path) -> str:
    commands = Path(sys.executable).parent
    environment = cluster.environment | {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        words, cwd=workplace, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, f"{block.name}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def as_here(text: str, cluster: ServedCluster) -> str:
    return text.replace("http://127.0.0.1:8000", cluster.url).replace(
        "127.0.0.1:8001", f"127.0.0.1:{cluster.config.router.grpc_port}"
    )


@pytest.mark.parametrize("block", run_by_tests(), ids=lambda block: block.name)
def test_commands_run_as_printed(block: Block, cluster: ServedCluster, workplace: Path) -> None:
    said = run(block, ["bash", "-euo", "pipefail", "-c", as_here(block.text, cluster)], cluster, workplace)
    assert said.strip()
    assert '"error"' not in said, "curl ends well whatever it is answered"


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_programs_run_as_printed(block: Block, cluster: ServedCluster, workplace: Path) -> None:
    text = as_here(block.text, cluster).replace("CHECKPOINT_DIRECTORY", "models/whalepod-tiny")
    assert run(block, [sys.executable, "-c", text], cluster, workplace).strip()


@pytest.mark.skipif((ROOT / ".venv").is_symlink(), reason="make would install into another clone's environment")
@pytest.mark.skipif(not (ROOT / ".venv/installed").exists(), reason="make has not made this environment")
def test_make_serve_is_ready_and_ends_with_an_interrupt(tmp_path: Path) -> None:
    """What the quick start begins with, from where the environment is there already."""
    config = with_own_ports(ClusterConfig())
    ports = {"http": config.router.http_port, "grpc": config.router.grpc_port, "redis": config.redis_port}
    ports |= {"prefill": config.prefill.port, "decode": config.decode.port}
    flags = " ".join(f"--{name}-port {port}" for name, port in ports.items())
    make = shutil.which("make")
    assert make is not None
    process = subprocess.Popen(
        ["timeout", "--foreground", "--signal=INT", "120", make, "serve", f"ARGS={flags}"],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("ready after"):
            break
    process.terminate()
    said += process.communicate(timeout=60)[0]
    assert re.search(r"^ready after", said, re.MULTILINE), said
    assert "stopped" in said
    assert json.dumps({"model": "whalepod-tiny"})[1:-1] in said, "it prints a curl line"
