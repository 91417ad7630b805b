"""Images and the compose file: pinned, unprivileged, built from the lock file, and they start what exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.container_settings import known_variables, parsed
from tests.deploy.image_files import PINNED, context_files, instructions, lint
from tests.deploy.rendering import chart
from tests.deploy.started_redis import accepted_by_the_store_check
from tests.house_rules import PRODUCT_FOLDERS, ROOT
from tests.model.launches import launched, small_config
from whalepod import __version__
from whalepod.cluster.config import DIRECT_PORT_OFFSET, METRICS_PORT_OFFSET, ClusterConfig
from whalepod.cluster.config_sources import load_config
from whalepod.cluster.embedded_redis import find_redis_server

DOCKER = ROOT / "deploy/docker"
IMAGES = ("cpu", "cuda")
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
OURS = {name: service for name, service in COMPOSE["services"].items() if service["image"].startswith("whalepod:")}


def dockerfile(image: str) -> str:
    return (DOCKER / f"Dockerfile.{image}").read_text(encoding="utf-8")


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_pinned_unprivileged_and_built_from_the_lock_file(image: str) -> None:
    assert list(lint(dockerfile(image))) == []


@pytest.mark.parametrize(
    ("line", "by"),
    [
        ("ARG PYTHON_IMAGE=python:3.11.13-slim-bookworm", "ARG PYTHON_IMAGE=python:latest"),
        ("USER 10001:10001", "USER root"),
        ("USER 10001:10001", ""),
        ("COPY --from=build /opt/whalepod /opt/whalepod", "COPY . /opt/whalepod"),
        ("COPY . .", "ADD . ."),
        ("--no-install-recommends ", ""),
        ('ENTRYPOINT ["tini", "--", "whalepod"]', "ENTRYPOINT whalepod"),
        ("RUN deploy/docker/build.sh package", "RUN pip install ."),
        ("WORKDIR /tmp", "ENV CLUSTER_SECRET=hush"),
        ("WORKDIR /tmp", "RUN wget -q https://x.example/install.sh | sh"),
    ],
)
def test_what_no_image_may_do_is_noticed(line: str, by: str) -> None:
    text = dockerfile("cpu")
    assert line in text
    assert list(lint(text.replace(line, by)))


@pytest.mark.parametrize("image", IMAGES)
def test_steps_and_ports_of_an_image_are_those_of_the_program(image: str) -> None:
    steps = instructions(dockerfile(image))
    known = set(re.findall(r"^(\w+)\(\) \{$", (DOCKER / "build.sh").read_text(encoding="utf-8"), flags=re.MULTILINE))
    runs = [step.text.split()[1] for step in steps if step.name == "RUN" and "build.sh" in step.text]
    assert set(runs) <= known
    assert runs[:2] == ["requirements", "package"]
    assert ("kernels" in runs) == (image == "cuda")
    (exposed,) = [step.text for step in steps if step.name == "EXPOSE"]
    config = ClusterConfig()
    pools = [config.prefill.port, config.decode.port, config.vision.port]
    ports = {
        config.router.http_port,
        config.router.grpc_port,
        chart().values["router"]["ports"]["admin"],
        config.kv.port,
    }
    ports |= {*pools, *(port + METRICS_PORT_OFFSET for port in pools), config.prefill.port + DIRECT_PORT_OFFSET}
    assert set(map(int, exposed.split())) == ports


@pytest.mark.parametrize("image", IMAGES)
def test_what_an_image_copies_is_let_into_its_build(image: str) -> None:
    files = set(context_files())
    for step in instructions(dockerfile(image)):
        if step.name == "COPY" and "--from=" not in step.text:
            for source in step.text.split()[:-1]:
                assert source == "." or source in files, source
    assert {name.split("/")[0] for name in files} >= {*PRODUCT_FOLDERS, "models", "src"}
    assert not [name for name in files if name.startswith(("tests/", ".git", "docs/"))]


def test_versions_are_the_packages() -> None:
    assert f'image.version="{__version__}"' in dockerfile("cpu")
    assert f'image.version="{__version__}-cuda"' in dockerfile("cuda")
    assert {service["image"] for service in OURS.values()} == {f"whalepod:{__version__}"}
    cuda = [path for path in (ROOT / "deploy/k8s/examples").glob("*.yaml") if "device: cuda" in path.read_text()]
    assert len(cuda) == 2
    for path in cuda:
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["image"]["tag"] == f"{__version__}-cuda"


# ----------------------------------------------------------------------------------------------------------- compose


def config_of_service(service: dict[str, Any]) -> ClusterConfig:
    values = {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text) for name, text in service["environment"].items()}
    assert set(values) <= known_variables()
    return load_config(variables=values, flags={})


def test_containers_of_the_compose_file_are_pinned_and_unprivileged() -> None:
    for name, service in COMPOSE["services"].items():
        assert PINNED.match(service["image"]), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} listens to everybody"
        for volume in service.get("volumes", []):
            assert (DOCKER / volume.split(":")[0]).exists(), volume


def test_processes_of_the_compose_file_take_their_settings_and_answer_where_they_are_asked() -> None:
    assert set(OURS) == {"router", "prefill", "decode", "kv"}
    for name, service in OURS.items():
        command, _ = parsed(list(service["command"]))
        assert command == ("kv serve" if name == "kv" else name)
        config = config_of_service(service)
        assert config.ranks_apart
        assert config.redis_url == "redis://redis:6380/0"
        if name == "kv":
            continue
        assert config.reachable_host == name
        port = config.router.admin_port if name == "router" else config.pool(name).port + METRICS_PORT_OFFSET
        assert f"http://127.0.0.1:{port}/" in service["healthcheck"]["test"][-1]


def test_prometheus_of_the_compose_file_asks_the_processes_where_they_listen() -> None:
    scraped = yaml.safe_load((DOCKER / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {target for job in scraped for group in job["static_configs"] for target in group["targets"]}
    config = config_of_service(OURS["router"])
    ranks = {f"{name}:{config.pool(name).port + METRICS_PORT_OFFSET}" for name in ("prefill", "decode")}
    own = {f"router:{config.router.admin_port}", f"kv:{config.kv.port + METRICS_PORT_OFFSET}"}
    assert targets == own | ranks


def test_the_compose_files_redis_is_accepted_by_processes(tmp_path: Path) -> None:
    text = (DOCKER / "redis.conf").read_text(encoding="utf-8")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    conf = {key: value for key, _, value in lines}
    assert conf["port"] == "6380"
    assert accepted_by_the_store_check(conf, find_redis_server(), tmp_path)


# ----------------------------------------------------------------------------------------------------------- a build


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_steps_of_an_image_build_a_program_that_answers(tmp_path: Path) -> None:
    """The same steps as in the image for CPUs, in an empty root folder and a clean virtual environment."""
    sources, prefix = tmp_path / "build", tmp_path / "opt/whalepod"
    for name in context_files():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, sources / name, follow_symlinks=False)
    prefix.parent.mkdir()
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).parent
    environment = {"PREFIX": str(prefix), "PATH": f"{interpreter}:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def run(*words: str, cwd: Path = sources) -> str:
        done = subprocess.run(
            words, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=1000
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for step in instructions(dockerfile("cpu")):
        if step.name == "RUN" and "build.sh" in step.text:
            run(*step.text.split())
    shutil.rmtree(sources)
    whalepod, elsewhere = str(prefix / "bin/whalepod"), tmp_path
    assert run(whalepod, "--version", cwd=elsewhere).strip() == f"whalepod {__version__}"
    model = chart().values["model"]["path"].replace("/opt/whalepod", str(prefix))
    words = run(whalepod, "generate", "Whales are", "--model", model, "--max-tokens", "4", cwd=elsewhere)
    assert words.strip()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rank_finds_the_kernels_that_the_image_for_gpus_has_compiled(tmp_path: Path) -> None:
    """Its step `kernels`, by a program that is installed without its sources, for a small model of the same heads; the
    packages that it needs are those of the tests."""
    sources, prefix = tmp_path / "build", tmp_path / "opt/whalepod"
    for name in context_files():
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, sources / name, follow_symlinks=False)
    python, config = str(prefix / "bin/python"), small_config(tmp_path)
    environment = {"PREFIX": str(prefix), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    environment |= {"TRITON_CACHE_DIR": str(prefix / "triton")}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, cwd=sources, env=environment, capture_output=True, text=True, check=False, timeout=1000
        )
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    run(sys.executable, "-m", "venv", str(prefix))
    run(python, "-m", "pip", "install", "--constraint", "constraints.txt", "setuptools")
    run("deploy/docker/build.sh", "package")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    (site / "packages.pth").write_text(str(Path(pytest.__file__).parents[1]), encoding="utf-8")
    few = ("--config", str(config), "--architecture", "90", "--sequences", "1", "--processes", "2")
    run("deploy/docker/build.sh", "kernels", *few)
    shutil.rmtree(sources)
    # As the chart's pods do it.
    shutil.copytree(prefix / "triton", tmp_path / "triton")
    found = launched(config, tmp_path / "triton", architecture=90, python=python)
    assert len(found["hits"]) == found["count"]
    assert all(hit for _, hit in found["hits"])


def test_the_compiled_kernels_are_copied_to_where_ranks_look_for_them() -> None:
    settings = [step.text for step in instructions(dockerfile("cuda")) if step.name == "ENV"]
    built, read = (re.search(r"TRITON_CACHE_DIR=(\S+)", text) for text in settings)
    assert built is not None
    assert read is not None
    pod = (ROOT / "deploy/k8s/whalepod/templates/_pod.tpl").read_text(encoding="utf-8")
    assert f"[cp, -r, {built[1]}, {Path(read[1]).parent}/]" in pod
    assert Path(built[1]).name == Path(read[1]).name
