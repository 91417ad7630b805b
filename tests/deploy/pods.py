"""Pods of a rendered chart as processes of this machine, each with a loopback address of its own instead of a pod's.

Command, arguments, variables, configuration and probes are the rendered ones. What a node would add is put in:
addresses for names, files for mounts, and `WHALEPOD_HOST`, because here all share one network.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.container_settings import environment
from tests.deploy.rendering import Manifest, PodTemplate, cluster_yaml, of_kind
from whalepod.cluster.embedded_redis import find_redis_server
from whalepod.cluster.shipped_model import shipped_model_dir

UNITS = {"Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True, slots=True)
class Node:
    """Where processes of one release run: what stands for its mounts and its names."""

    manifests: list[Manifest]
    directory: Path
    names: Mapping[str, str]
    """Names of the cluster's DNS → addresses here."""

    def text(self, rendered: str) -> str:
        """`rendered` with what is called otherwise here."""
        for name, here in {
            **self.names,
            "/etc/whalepod/secret": str(self.directory),
            "/etc/whalepod": str(self.directory),
            "/opt/whalepod/models/whalepod-tiny": str(shipped_model_dir()),
            "/data": str(self.directory),
            "/etc/redis": str(self.directory),
        }.items():
            rendered = rendered.replace(name, here)
        return rendered

    def write_files(self, *, rank_host: str) -> None:
        config = re.sub(r"^rank_host: .*$", f"rank_host: {rank_host}", cluster_yaml(self.manifests), flags=re.MULTILINE)
        (self.directory / "cluster.yaml").write_text(self.text(config), encoding="utf-8")
        (self.directory / "cluster-secret").write_text("hush, it is a test's", encoding="utf-8")
        (conf,) = (m["data"]["redis.conf"] for m in of_kind(self.manifests, "ConfigMap") if "redis.conf" in m["data"])
        (self.directory / "redis.conf").write_text(self.text(conf), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    address: str
    template: PodTemplate
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, node: Node, template: PodTemplate, *, address: str, index: int = 0) -> Pod:
        name = f"{template.role}-{index}"
        container = template.container
        fields = {"status.podIP": address, "metadata.labels['apps.kubernetes.io/pod-index']": str(index)}
        own = {key: node.text(value) for key, value in environment(container, fields=fields).items()}
        base = {key: value for key, value in os.environ.items() if not key.startswith(("WHALEPOD_", "DEEPINFER_"))}
        arguments = [re.sub(r"\$\((\w+)\)", lambda match: own[match[1]], each) for each in container["args"]]
        words = [node.text(word) for word in [*container["command"], *arguments]]
        if words[0] == "whalepod":
            words[:1] = [sys.executable, "-m", "whalepod"]
            own |= {"WHALEPOD_HOST": address, "HOME": str(node.directory)}
        else:
            words[:1] = [str(find_redis_server())]
            words += ["--bind", address]
        log = node.directory / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(words, env=base | own, stdout=out, stderr=out)
        return cls(name, address, template, process, log)

    def port(self, port: int | str) -> int:
        """A port of a probe, by its number or its name."""
        if isinstance(port, int):
            return port
        return next(each["containerPort"] for each in self.template.container["ports"] if each["name"] == port)

    def passes(self, probe: str) -> bool:
        """Whether kubelet would be content now."""
        what = self.template.container[probe]
        if "grpc" in what:
            return _serves(f"{self.address}:{self.port(what['grpc']['port'])}")
        if "httpGet" in what:
            url = f"http://{self.address}:{self.port(what['httpGet']['port'])}{what['httpGet']['path']}"
            try:
                return httpx.get(url, timeout=what["timeoutSeconds"], trust_env=False).is_success
            except httpx.HTTPError:
                return False
        return True  # redis-cli is not on every machine

    @property
    def memory_share(self) -> float:
        """Resident memory, of what the pod may have."""
        limit = self.template.container["resources"]["limits"]["memory"]
        return psutil.Process(self.process.pid).memory_info().rss / (int(limit[:-2]) * UNITS[limit[-2:]])

    def terminate(self) -> int:
        """As kubelet does it. The exit code; raises TimeoutExpired where kubelet would kill."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.template.spec.get("terminationGracePeriodSeconds", 30))

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _serves(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=3)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING
