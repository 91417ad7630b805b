"""A Ray that is not there, or whose machines would not reach each other, is named at once."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.cluster.conftest import free_port
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.ray_runtime import check_reachable, prepare_ray_environment, start_ray
from whalepod.core.errors import ConfigError, UnavailableError


@pytest.mark.slow  # imports Ray
def test_a_ray_that_nobody_runs_is_named_by_its_setting_and_not_waited_for(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = ClusterConfig.model_validate({"ray": {"address": address}})
    prepare_ray_environment(config)
    with pytest.raises(UnavailableError, match=rf"joined at {address} \(ray.address\): .*refused"):
        start_ray(config, temp_dir=tmp_path, namespace="a")


@pytest.mark.parametrize(
    ("settings", "machines", "wrong"),
    [
        ({}, 1, None),
        ({}, 2, "redis_url"),
        ({"redis_url": "redis://localhost:6379", "host": "0.0.0.0"}, 2, "redis_url"),
        ({"redis_url": "redis://store:6379"}, 2, "host is 127.0.0.1"),
        ({"redis_url": "redis://store:6379", "host": "0.0.0.0"}, 2, None),
    ],
)
def test_ranks_on_several_machines_need_a_store_and_addresses_that_all_reach(
    settings: dict[str, str], machines: int, wrong: str | None
) -> None:
    config = ClusterConfig.model_validate(settings)
    with contextlib.nullcontext() if wrong is None else pytest.raises(ConfigError, match=wrong):
        check_reachable(config, machines=machines)
