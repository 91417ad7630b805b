"""With `ray.enabled` the chart starts ranks in a Ray cluster, by jobs that exist."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.container_settings import config_of, environment
from tests.deploy.custom_fields import field_errors
from tests.deploy.rendering import EXAMPLES, of_kind, pod_templates, render
from tests.house_rules import ROOT
from whalepod.cluster.jobs.job_cluster import add_cluster_arguments
from whalepod.cluster.ray_runtime import MACHINE_ENVIRONMENT


def test_ray_starts_the_ranks_by_a_job_that_exists_with_room_for_one_rank_a_pod(tmp_path: Path) -> None:
    manifests = render(EXAMPLES["ray"])
    (cluster,), (job,) = of_kind(manifests, "RayCluster"), of_kind(manifests, "RayJob")
    python, module, name, *words = shlex.split(job["spec"]["entrypoint"])
    assert (python, module) == ("python", "-m")
    assert (ROOT / name.removeprefix("whalepod.").replace(".", "/") / "__main__.py").is_file()
    parser = argparse.ArgumentParser()
    add_cluster_arguments(parser)
    assert str(parser.parse_args(words).config) == "/etc/whalepod/cluster.yaml"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    (head, *workers) = [each for each in pod_templates(manifests) if each.owner is cluster]
    config = config_of(head, manifests, tmp_path)
    assert config.ray.pool_resources
    assert [worker.role for worker in workers] == ["prefill", "decode", "vision"]
    for each in (head, *workers):
        assert environment(each.container).items() >= MACHINE_ENVIRONMENT.items()
    for group in cluster["spec"]["workerGroupSpecs"]:
        assert group["replicas"] == config.pool(group["groupName"]).replicas
        resources = yaml.safe_load(yaml.safe_load(group["rayStartParams"]["resources"]))
        assert resources == {f"whalepod_{group['groupName']}": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["job-batch", "job-bench"])
def test_an_example_of_a_job_is_valid_and_gives_flags_that_exist(name: str) -> None:
    manifest = yaml.safe_load((ROOT / f"deploy/k8s/examples/{name}.yaml").read_text(encoding="utf-8"))
    assert field_errors(manifest, "1.30") == []
    python, module, job, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert (python, module) == ("python", "-m")
    help_page = subprocess.run(
        [sys.executable, "-m", job, "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    flags = [word for word in words if word.startswith("--")]
    assert len(flags) >= 3
    assert all(f" {flag} " in help_page for flag in flags)
    (service,) = (m for m in of_kind(render(EXAMPLES["ray"]), "Service") if m["metadata"]["name"] == "demo-whalepod")
    assert f"http://demo-whalepod:{service['spec']['ports'][0]['port']}" in words
