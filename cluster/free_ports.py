"""Ports for a cluster beside others on one machine."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping

from .config import DIRECT_PORT_OFFSET, METRICS_PORT_OFFSET, ClusterConfig

SEARCH_FROM, SEARCH_TO = 20_000, 31_000
"""Below the range that the system hands out to outgoing connections, which may take a port between look and use."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind((host, port))
            return True
    return False


def busy_ports(config: ClusterConfig) -> Mapping[str, int]:
    """The ports of `config` that something listens on: setting to port."""
    return {setting: port for setting, port in config.ports().items() if not is_free(port, config.host)}


def with_free_ports(config: ClusterConfig, *, search_from: int = SEARCH_FROM) -> ClusterConfig:
    """A copy whose ports are free at this moment."""
    runs = _free_runs(search_from)
    router = config.router.model_copy(update={"http_port": next(runs), "grpc_port": next(runs)})
    redis_port = next(runs)
    prefill = config.prefill.model_copy(update={"port": _consecutive(runs, config.prefill.replicas)})
    decode = config.decode.model_copy(update={"port": _consecutive(runs, config.decode.replicas)})
    vision = config.vision.model_copy(update={"port": _consecutive(runs, config.vision.replicas)})
    ports = {"router": router, "redis_port": redis_port, "prefill": prefill, "decode": decode, "vision": vision}
    return ClusterConfig.model_validate(config.model_copy(update=ports))


def _free_runs(search_from: int) -> Iterator[int]:
    """Free ports, ascending, whose metrics and direct ports are free too."""
    for port in range(search_from, SEARCH_TO):
        if all(is_free(port + offset) for offset in (0, METRICS_PORT_OFFSET, DIRECT_PORT_OFFSET)):
            yield port


def _consecutive(ports: Iterator[int], count: int) -> int:
    """The first of `count` (or 1) ports that follow each other."""
    first = last = next(ports)
    while last - first < count - 1:
        port = next(ports)
        first, last = (first, port) if port == last + 1 else (port, port)
    return first
