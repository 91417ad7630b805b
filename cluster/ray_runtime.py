"""A Ray of our own on this machine, or a running one to join. Ray starts ranks; no request ever passes through it.

Ours listens on loopback, on ports that the system chooses, so that it never meets another Ray or a Redis on 6379.

Ray reads its settings from the environment when it is imported, so `prepare_ray_environment` comes first. Every call
must come from one thread that lives as long as Ray: its daemons end with the thread that started them.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from whalepod.core.errors import ConfigError, UnavailableError
from whalepod.kvstore.settings import StoreAddress

from .config import ClusterConfig
from .worker_signals import INSTALL

MACHINE_ENVIRONMENT: Mapping[str, str] = {
    "RAY_worker_niceness": "0",  # else ranks get the time that nothing else on the machine wants: 15 below their parent
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # else it takes SIGTERM for a crash, and for itself
    "RAY_gcs_rpc_server_reconnect_timeout_s": "2147483",  # ranks outlive the head
}
"""What Ray reads as it starts on a machine. A Ray that others have started (docs/ray.md, the chart) needs it too."""
RAY_ENVIRONMENT: Mapping[str, str] = {
    **MACHINE_ENVIRONMENT,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else it listens on every interface, whatever address it was given
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}
OBJECT_STORE_BYTES = 80 * 2**20
"""The least that Ray takes: nothing of ours goes through its object store."""
ANSWER_S = 10.0


def prepare_ray_environment(config: ClusterConfig) -> None:
    """Before the first `import ray`, here and in what this process starts. What the user has set stays."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if config.ray.address is None:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # loopback only


def start_ray(config: ClusterConfig, *, temp_dir: Path, namespace: str) -> None:
    """Join `ray.address`, or start a Ray on loopback with room for every rank. `temp_dir` must be short: it holds
    sockets, whose paths may have 107 characters. Raises UnavailableError, and ConfigError as `check_reachable` does."""
    import ray  # noqa: PLC0415  after the environment is ready

    shared: dict[str, Any] = {
        "namespace": namespace,
        "logging_level": logging.ERROR,
        "runtime_env": {"worker_process_setup_hook": INSTALL},
    }
    address = config.ray.address
    try:
        if address is not None:
            _check_answers(address)
            ray.init(address=address, **shared)
            machines = {node["NodeManagerAddress"] for node in cast("Any", ray).nodes() if node["Alive"]}
            check_reachable(config, machines=len(machines))
            return
        cpus = sum(pool.replicas * pool.cpus for pool in (config.prefill, config.decode, config.vision))
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, int(-(-cpus // 1))),
            include_dashboard=config.ray.dashboard,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(temp_dir),
            **shared,
        )
    except ConfigError:
        raise
    except Exception as error:  # Ray raises no narrower one when a part of it is too slow
        what = "did not start" if address is None else f"cannot be joined at {address} (ray.address)"
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = ". A machine that is too busy looks like this, too: try again" if address is None else ""
        raise UnavailableError(f"Ray {what}: {said}{hint}") from error


def check_reachable(config: ClusterConfig, *, machines: int) -> None:
    """Raises ConfigError where a rank on another machine of this Ray could not reach the store, or not be reached."""
    redis_is_here = config.redis_url is None or StoreAddress.parse(config.redis_url).is_local
    wrong = ["redis_url names a server that only this machine reaches"] if redis_is_here else []
    if StoreAddress(host=config.host).is_local:
        wrong.append(f"host is {config.host}")
    if machines > 1 and wrong:
        raise ConfigError(
            f"Ray has {machines} machines, but {' and '.join(wrong)}: set redis_url to a Redis that all of them reach, "
            "and host to 0.0.0.0"
        )


def _check_answers(address: str) -> None:
    """Raises OSError if nothing listens at `host:port`. Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()


def stop_ray() -> None:
    """Leave Ray; one of our own ends with it, by process and never by name. Idempotent."""
    import ray  # noqa: PLC0415

    ray.shutdown()
