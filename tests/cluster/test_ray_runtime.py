"""A Ray that is not there is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.conftest import free_port
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.ray_runtime import prepare_ray_environment, start_ray
from whalepod.core.errors import UnavailableError


@pytest.mark.slow  # imports Ray
def test_a_ray_that_nobody_runs_is_named_by_its_setting_and_not_waited_for(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    config = ClusterConfig.model_validate({"ray": {"address": address}})
    prepare_ray_environment(config)
    with pytest.raises(UnavailableError, match=rf"joined at {address} \(ray.address\): .*refused"):
        start_ray(config, temp_dir=tmp_path, namespace="a")
