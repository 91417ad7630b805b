"""Ports for the clusters of tests: each worker of a run searches in numbers of its own, and no command that finds ports
by itself (`canary`, jobs) looks there."""

from __future__ import annotations

import os

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.free_ports import with_free_ports

FIRST, OF_A_WORKER = 28_000, 400


def with_own_ports(config: ClusterConfig) -> ClusterConfig:
    """A copy whose ports are free at this moment, and looked for by nobody else."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return with_free_ports(config, search_from=FIRST + OF_A_WORKER * worker)
