"""`whalepod doctor`: what this machine lacks for the settings that are given, and how to get it.

Each check is a function that looks at one thing and yields findings. Checks change nothing and leave nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import cast

import psutil
import redis
import typer

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import settings
from whalepod.cluster.embedded_redis import VERSION_MIN, find_redis_server, server_version
from whalepod.cluster.free_ports import busy_ports
from whalepod.cluster.machine_memory import CGROUP, machine_memory
from whalepod.cluster.serve_lock import serving_record
from whalepod.core.errors import CheckpointError, ConfigError
from whalepod.core.visible_devices import VARIABLE as VISIBLE_DEVICES
from whalepod.core.visible_devices import visible_devices

from .cluster_options import with_known_cluster
from .user_dirs import state_dir

MIB = 1 << 20
RANK_MIB = 500
"""What a process with torch and no weights to speak of takes."""
RAY_MIB = 520
OPEN_FILES_MIN = 4096
PROCESSES_MIN = 4096
SHARED_MEMORY_MIB_MIN = 80
"""Ray refuses to start an object store smaller than 75 MiB."""
REDIS_TIMEOUT_S = 2.0
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


class Verdict(Enum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `fix` is what to do about it; empty when nothing is wrong."""

    verdict: Verdict
    subject: str
    text: str
    fix: str = ""


@with_known_cluster
def doctor(config: ClusterConfig) -> None:
    """Check this machine for the given settings: Python, packages, Redis, ports, processors, memory, GPUs."""
    findings = [finding for check in CHECKS for finding in check(config)]
    for finding in findings:
        color = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "red"}[finding.verdict]
        typer.echo(f"{typer.style(f'{finding.verdict.value:8}', fg=color)} {finding.subject:9} {finding.text}")
        if finding.fix:
            typer.echo(f"{'':18} fix: {finding.fix}")
    failures = sum(finding.verdict is Verdict.FAILURE for finding in findings)
    warnings = sum(finding.verdict is Verdict.WARNING for finding in findings)
    typer.echo(f"failures: {failures}, warnings: {warnings}")
    if failures:
        raise typer.Exit(1)


def check_python(_: ClusterConfig) -> Iterator[Finding]:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        yield Finding(Verdict.OK, "python", version)
    else:
        yield Finding(Verdict.FAILURE, "python", f"{version} is not tested", "use Python 3.11 or 3.12")


def check_packages(_: ClusterConfig) -> Iterator[Finding]:
    """Everything that Whalepod declares is installed."""
    required = [line for line in importlib.metadata.requires("whalepod") or [] if "extra ==" not in line]
    names = [match.group() for line in required if (match := re.match(r"[\w.-]+", line))]
    missing = [name for name in names if not _installed(name)]
    if missing:
        yield Finding(Verdict.FAILURE, "packages", f"missing: {', '.join(missing)}", "make venv")
    else:
        yield Finding(Verdict.OK, "packages", f"all {len(names)} are installed")


def check_torch(config: ClusterConfig) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it links is missing
        yield Finding(Verdict.FAILURE, "torch", f"cannot be imported: {error}", "make clean venv")
        return
    ranks = config.prefill.replicas + config.decode.replicas + config.vision.replicas
    threads, cores = ranks * config.engine.threads, _cores()
    yield Finding(Verdict.OK, "torch", str(torch.__version__))
    if threads > cores:
        yield Finding(
            Verdict.WARNING,
            "threads",
            f"{ranks} ranks of {config.engine.threads} threads share {cores} cores",
            "lower engine.threads, or start fewer ranks on this machine",
        )
    else:
        yield Finding(Verdict.OK, "threads", f"{threads} of {cores} cores are the ranks'")


def check_gpus(_: ClusterConfig) -> Iterator[Finding]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield Finding(Verdict.OK, "gpu", f"{', '.join(names)}{limit}")
        if importlib.util.find_spec("triton") is None:
            yield Finding(
                Verdict.WARNING, "triton", "is not installed: kernels run as plain torch", "pip install '.[gpu]'"
            )
    elif not Path("/dev/nvidiactl").exists():
        yield Finding(Verdict.OK, "gpu", "none: everything runs on the CPU")
    elif torch.version.cuda is None:
        fix = "install a torch built for CUDA (docs/configuration.md, Which torch)"
        yield Finding(Verdict.WARNING, "gpu", "there is one, but this torch was built for CPU", fix)
    else:
        fix = (
            "unset CUDA_VISIBLE_DEVICES" if limit else f"update the driver: this torch needs CUDA {torch.version.cuda}"
        )
        yield Finding(Verdict.WARNING, "gpu", f"there is one, but torch cannot use it{limit}", fix)


def check_visible_gpus(_: ClusterConfig) -> Iterator[Finding]:
    """What CUDA_VISIBLE_DEVICES leaves of the GPUs that the driver has: ranks get theirs from these."""
    uuids = gpu_uuids()
    if not uuids:
        return
    variable = os.environ.get(VISIBLE_DEVICES)
    try:
        visible = visible_devices(variable, uuids)
    except ConfigError as error:
        yield Finding(Verdict.FAILURE, "gpu", str(error), f"name each device of {VISIBLE_DEVICES} once")
        return
    text = f"{len(visible)} of {len(uuids)} GPUs are visible: {', '.join(map(str, visible)) or 'none'}"
    named = 0 if not variable else len(variable.split(","))
    if named > len(visible):
        cut = f"{text}: {VISIBLE_DEVICES}={variable} ends at its first entry that names none"
        yield Finding(Verdict.WARNING, "gpu", cut, f"correct {VISIBLE_DEVICES}, or unset it")
    else:
        yield Finding(Verdict.OK, "gpu", text)


def gpu_uuids() -> list[str]:
    """Of the machine's GPUs in the order of their places on the bus, as the NVIDIA driver tells; empty without one."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(DRIVER_GPUS.glob("*/information"))]
    return [match[1] for text in texts if (match := re.search(r"GPU UUID:\s*(\S+)", text))]


def check_redis(config: ClusterConfig) -> Iterator[Finding]:
    needed = ".".join(str(part) for part in VERSION_MIN)
    if config.redis_url is None:
        try:
            binary = find_redis_server()
        except ConfigError as error:
            yield Finding(Verdict.FAILURE, "redis", str(error), "install redis-server, or make venv")
            return
        version = ".".join(str(part) for part in server_version(binary) or ())
        yield Finding(Verdict.OK, "redis", f"{version}, started with the cluster from {binary}")
        return
    try:
        timeouts = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
        with redis.Redis.from_url(config.redis_url, **timeouts) as client:
            version = cast(Mapping[str, str], client.info("server"))["redis_version"]
    except (redis.RedisError, ValueError) as error:
        yield Finding(Verdict.FAILURE, "redis", f"redis_url does not answer: {error}", "start it, or correct redis_url")
        return
    if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
        yield Finding(Verdict.FAILURE, "redis", f"redis_url is {version}", f"use {needed} or newer")
    else:
        yield Finding(Verdict.OK, "redis", f"{version} answers at redis_url")


def check_ports(config: ClusterConfig) -> Iterator[Finding]:
    flags = {setting.name: setting.flag for setting in settings()}
    busy = busy_ports(config)
    if busy and (record := serving_record(state_dir(), config.router.http_port)) is not None:
        text = f"in use by your own cluster at {record.http_url}, process {record.pid}"
        yield Finding(Verdict.OK, "ports", text)
        return
    for name, port in busy.items():
        setting = name.split(" ")[0]
        flag = flags.get(setting.replace(".", "_"), f"the setting {setting}")
        text = f"{port} ({name}) is taken; is a cluster running here already?"
        yield Finding(Verdict.FAILURE, "ports", text, f"stop what listens there, or choose another with {flag}")
    if not busy:
        yield Finding(Verdict.OK, "ports", f"all {len(config.ports())} are free on {config.host}")


def check_memory(config: ClusterConfig) -> Iterator[Finding]:
    """Room for the processes themselves; what weights and KV need, each rank's memory plan says when it starts."""
    ranks = config.prefill.replicas + config.decode.replicas + config.vision.replicas
    embedded_redis_mib = 0 if config.redis_url else config.redis_memory_mib
    needed_mib = (ranks + 1) * RANK_MIB + RAY_MIB + embedded_redis_mib
    memory = machine_memory()
    free_mib = memory.available // MIB
    if memory.limit is not None:
        text = (
            f"this container may have {memory.limit // MIB} MiB; {memory.page_cache // MIB} MiB of that are page cache"
        )
        yield Finding(Verdict.OK, "limit", f"{text}, which counts, and is given back")
    if free_mib < needed_mib:
        text = f"{free_mib} MiB are free, {ranks} ranks, Ray and Redis take about {needed_mib} MiB"
        yield Finding(Verdict.WARNING, "memory", text, "close something, start fewer ranks, or lower redis_memory_mib")
    else:
        yield Finding(
            Verdict.OK, "memory", f"{free_mib} MiB are free, about {needed_mib} MiB are needed beside weights"
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (shared_mib := psutil.disk_usage(str(shared)).free // MIB) < SHARED_MEMORY_MIB_MIN:
        text = f"{shared} has {shared_mib} MiB free, Ray takes {SHARED_MEMORY_MIB_MIN} MiB"
        yield Finding(Verdict.FAILURE, "memory", text, "give it more; for a container, --shm-size=256m")


def check_open_files(_: ClusterConfig) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN:
        fix = f"ulimit -n {OPEN_FILES_MIN}" if hard >= OPEN_FILES_MIN else "raise the hard limit of open files"
        yield Finding(Verdict.WARNING, "files", f"a process may open {soft}, streams need more", fix)
    else:
        yield Finding(Verdict.OK, "files", f"a process may open {'any number' if soft < 0 else soft}")


def check_limits(_: ClusterConfig) -> Iterator[Finding]:
    """Limits that end a rank late, and say little when they do."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        text = f"a process may map {soft // MIB} MiB, n-gram tables are mapped whole"
        yield Finding(Verdict.WARNING, "limits", text, "ulimit -v unlimited")
    processes, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY and processes < PROCESSES_MIN:
        text = f"a user may have {processes} processes and threads, a rank has dozens"
        yield Finding(Verdict.WARNING, "limits", text, f"ulimit -u {PROCESSES_MIN}")
    try:
        tasks = (CGROUP / "pids.max").read_text(encoding="ascii").strip()
    except OSError:
        return
    if tasks.isdigit() and int(tasks) < PROCESSES_MIN:
        text = f"this container may have {tasks} processes and threads, a rank has dozens"
        yield Finding(Verdict.WARNING, "limits", text, f"raise its pids limit to {PROCESSES_MIN}")


def check_model(config: ClusterConfig) -> Iterator[Finding]:
    if config.model is None:
        yield Finding(Verdict.OK, "model", "the small one that ships")
        return
    from whalepod.model.config import ModelConfig

    try:
        model = ModelConfig.from_dir(config.model)
    except (ConfigError, CheckpointError, OSError) as error:
        yield Finding(Verdict.FAILURE, "model", f"{config.model}: {error}", "name a checkpoint directory with --model")
    else:
        layers, context = model.num_hidden_layers, model.max_position_embeddings
        yield Finding(Verdict.OK, "model", f"{config.model}: {layers} layers, contexts up to {context} tokens")


CHECKS: tuple[Callable[[ClusterConfig], Iterator[Finding]], ...] = (
    check_python,
    check_packages,
    check_torch,
    check_gpus,
    check_visible_gpus,
    check_redis,
    check_ports,
    check_memory,
    check_open_files,
    check_limits,
    check_model,
)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cores() -> int:
    """Cores that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
