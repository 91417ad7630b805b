"""The chart renders valid objects for every example, and starts what exists: commands, settings, ports, probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import HelmRenderError, HelmValuesError

from tests.deploy.chart_check import Figures, invalid_objects, lint_errors
from tests.deploy.container_settings import OUR_COMMANDS, config_of, environment, known_variables, parsed
from tests.deploy.custom_fields import field_errors
from tests.deploy.known_series import known_series
from tests.deploy.rendering import (
    EXAMPLES,
    KUBERNETES_VERSIONS,
    RELEASE_NAMES,
    Manifest,
    PodTemplate,
    chart,
    cluster_yaml,
    merged,
    of_kind,
    pod_templates,
    render,
    schema_errors,
)
from tests.deploy.started_redis import accepted_by_the_store_check
from tests.deploy.value_leaves import CONTEXTS, leaves, leaves_without_effect
from tests.deploy.values_schema import OWNED, SCHEMA_FILE, text
from tests.house_rules import ROOT
from whalepod import __version__
from whalepod.cluster.config import DIRECT_PORT_OFFSET, METRICS_PORT_OFFSET
from whalepod.cluster.config_sources import settings, unknown_variables
from whalepod.cluster.embedded_redis import find_redis_server
from whalepod.cluster.rank_server import SERVER_GRACE_S
from whalepod.services.router.http_server import CLOSE_GRACE_S
from whalepod.services.router.openapi import READS

ALL_CASES = {**EXAMPLES, **{f"context {index}": dict(values) for index, values in enumerate(CONTEXTS)}}
cases = pytest.mark.parametrize("values", ALL_CASES.values(), ids=ALL_CASES.keys())


def ours(manifests: list[Manifest]) -> list[PodTemplate]:
    """Pods that run a command of ours."""
    return [each for each in pod_templates(manifests) if each.container.get("command", [""])[0] == "whalepod"]


# ------------------------------------------------------------------------------------------------------------- valid


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_strict_lint_is_clean(example: str) -> None:
    assert lint_errors(EXAMPLES[example]) == []


def test_every_object_is_valid_on_the_oldest_and_the_newest_kubernetes_under_any_name() -> None:
    figures = Figures()
    assert list(invalid_objects(("1.30", "1.37"), RELEASE_NAMES[-2:], count=figures)) == []
    assert figures.renders == len(EXAMPLES) * 3 >= 15


@pytest.mark.slow
def test_every_object_is_valid_on_every_kubernetes_under_five_names() -> None:
    assert list(invalid_objects(KUBERNETES_VERSIONS, RELEASE_NAMES, count=Figures())) == []


@cases
def test_names_fit_and_selectors_find_their_pods(values: dict[str, Any]) -> None:
    manifests = render(values, name=RELEASE_NAMES[-1])
    labels = [template.metadata["labels"] for template in pod_templates(manifests)]
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        assert len(name) <= (52 if manifest["kind"] == "StatefulSet" else 63), name
        selector = manifest["spec"].get("selector") if manifest["kind"] == "Service" else None
        if selector:
            assert any(selector.items() <= each.items() for each in labels), name


def test_what_an_api_server_would_refuse_is_noticed() -> None:
    (service,) = (m for m in of_kind(render(), "Service") if m["metadata"]["name"].endswith("-kv"))
    assert schema_errors(service, "1.30") == []
    assert schema_errors(merged(service, {"spec": {"port": 1}}), "1.30")
    (ray,) = of_kind(render(EXAMPLES["ray"]), "RayCluster")
    assert field_errors(ray, "1.30") == []
    assert field_errors(merged(ray, {"spec": {"headGroup": {}}}), "1.30")
    assert field_errors(merged(ray, {"spec": {"rayVersion": 2}}), "1.30")
    assert field_errors(merged(ray, {"spec": {"headGroupSpec": {"template": {"spec": {"container": []}}}}}), "1.30")


# ------------------------------------------------------------------------------------------------------------ values


def test_the_schema_is_made_from_the_values_and_the_settings() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == text(), "run `make docs`"


def test_unknown_keys_are_refused_in_every_section() -> None:
    sections = {path[:-1] for path, _ in leaves(chart().values)}
    free = {"resources", "requests", "limits", "labels", "podSecurityContext", "securityContext", "submitterResources"}
    closed = [path for path in sections if not free.intersection(path)]
    assert len(closed) > 30
    for path in closed:
        values: dict[str, Any] = {"unheardOf": 1}
        for key in reversed(path):
            values = {key: values}
        with pytest.raises(HelmValuesError, match="unheardOf"):
            render(values)


@pytest.mark.parametrize("key", [setting.path for setting in settings()], ids=".".join)
def test_every_setting_is_either_the_operators_or_the_charts(key: tuple[str, ...]) -> None:
    section, name = ("", *key)[-2:]
    owned = name in OWNED.get(section, ()) or section in OWNED[""]
    properties = chart().schema or {}
    allowed = properties["properties"]["settings"]["properties"]
    if section in allowed and section:
        allowed = properties["$defs"][allowed[section]["$ref"].rpartition("/")[2]]["properties"]
    elif section:
        allowed = {}
    assert (name in allowed) != owned


@cases
def test_the_chart_writes_only_settings_that_it_refuses_to_take(values: dict[str, Any]) -> None:
    without = {key: value for key, value in values.items() if key != "settings"}
    device = {"engine": {"device": "cuda"}} if any(values.get(p, {}).get("gpus") for p in ("prefill", "decode")) else {}
    written = yaml.safe_load(cluster_yaml(render({**without, "settings": device})))
    for name, value in written.items():
        if isinstance(value, dict) and name not in OWNED[""] | set(device):
            assert value.keys() <= OWNED[name]
        else:
            assert name in OWNED[""] | {"log_json"} | set(device)


@pytest.mark.slow
def test_every_leaf_of_the_values_changes_what_is_rendered() -> None:
    assert leaves_without_effect() == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"redis": {"enabled": False}}, "redis.external"),
    ({"redis": {"enabled": False, "external": {"url": "redis://a", "existingSecret": "b"}}}, "keep one"),
    ({"redis": {"enabled": False, "external": {"url": "redis://:word@store:6379/0"}}}, "password"),
    ({"redis": {"enabled": False, "external": {"url": "rediss://store:6379/0"}}}, "no TLS to the store"),
    ({"settings": {"kv": {"cluster": True}}}, "kv.cluster"),
    ({"prefill": {"gpus": 1}}, "engine.device"),
    ({"settings": {"engine": {"device": "cuda"}}}, "prefill.gpus"),
    ({"router": {"tls": {"clientCaKey": "ca.crt"}}}, "router.tls.existingSecret"),
    ({"peerTls": {"existingSecret": "peers"}}, "peerTls.name"),
    ({"router": {"ingress": {"enabled": True}, "tls": {"existingSecret": "tls"}}}, "router.ingress"),
    ({"ray": {"enabled": True}, "decode": {"autoscaling": {"enabled": True}}}, "ray.enabled"),
    ({"vision": {"autoscaling": {"enabled": True}}}, "vision.replicas"),
    ({"vision": {"replicas": 1, "autoscaling": {"enabled": True}}}, "keda"),
    (
        {"settings": {"decode": {"expert_parallel": True}}, "decode": {"autoscaling": {"enabled": True}}},
        "expert_parallel",
    ),
    (
        {"settings": {"prefill": {"context_parallel": 2}}, "prefill": {"autoscaling": {"enabled": True}}},
        "context_parallel",
    ),
    (
        {"settings": {"decode": {"expert_parallel": True}}, "decode": {"replicas": 2}, "ray": {"enabled": True}},
        "expert_parallel",
    ),
]


@pytest.mark.parametrize(("values", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_values_that_contradict_each_other_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmRenderError, match=named):
        render(values)


def test_versions_are_those_of_the_package_and_of_the_lock_file() -> None:
    metadata = chart().metadata
    assert (metadata["version"], metadata["appVersion"]) == (__version__, __version__)
    assert f"ray=={chart().values['ray']['version']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------- what is started


@cases
def test_every_process_takes_its_flags_its_variables_and_its_file(values: dict[str, Any], tmp_path: Path) -> None:
    manifests = render(values)
    commands: set[str] = set()
    for template in ours(manifests):
        container = template.container
        words = [*container["command"], *container["args"]]
        name, parameters = parsed(words[1:])
        commands.add(name)
        assert str(parameters["config_file"]) == "/etc/whalepod/cluster.yaml"
        variables = environment(container)
        assert {v for v in variables if v.startswith("WHALEPOD_")} <= known_variables()
        assert unknown_variables(variables) == {}
        config = config_of(template, manifests, tmp_path)
        assert config.host in ("0.0.0.0", "::")
        assert config.redis_url
        if template.role in ("router", "prefill", "decode", "vision"):
            assert config.reachable_host == "10.1.2.3"
    assert {"router", "kv serve"} <= commands
    assert commands <= {*OUR_COMMANDS, "kv serve"}


@cases
def test_ports_probes_and_names_are_those_of_the_processes(values: dict[str, Any], tmp_path: Path) -> None:
    manifests = render(values)
    for template in ours(manifests):
        config, container = config_of(template, manifests, tmp_path), template.container
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if template.role == "router":
            router = config.router
            assert ports == {"http": router.http_port, "grpc": router.grpc_port, "admin": router.admin_port}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] == "admin"
                assert container[probe]["httpGet"]["path"] in READS
            continue
        if template.role == "kv":
            assert ports == {"grpc": config.kv.port, "metrics": config.kv.port + METRICS_PORT_OFFSET}
        else:
            own = config.pool(template.role).port
            direct = {"direct": own + DIRECT_PORT_OFFSET} if template.role == "prefill" and config.serves_direct else {}
            assert ports == {"grpc": own, "metrics": own + METRICS_PORT_OFFSET} | direct
            assert config.ranks_apart, "else rank i would listen i above the port"
            _check_rank_host(template, config.rank_host, manifests)
        asked: dict[str, Any] = {"grpc": {"port": ports["grpc"]}}
        if config.tls.peer_cert_file is not None:  # probes have no certificate
            page = {"httpGet": {"path": "/metrics", "port": "metrics"}}
            asked = {"tcpSocket": {"port": "grpc"}} if template.role == "kv" else page
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe].items() >= asked.items()


def _check_rank_host(template: PodTemplate, rank_host: str | None, manifests: list[Manifest]) -> None:
    """Ranks find each other by the names that Kubernetes gives to the pods of a StatefulSet."""
    owner = template.owner
    assert rank_host is not None
    host = rank_host.format(pool=template.role, index=7)
    assert host.startswith(f"{owner['metadata']['name']}-7.{owner['spec']['serviceName']}.serving.svc.")
    (service,) = (m for m in of_kind(manifests, "Service") if m["metadata"]["name"] == owner["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "ranks that share experts meet before they are ready"


@cases
def test_a_pod_is_not_killed_before_it_has_drained(values: dict[str, Any], tmp_path: Path) -> None:
    manifests = render(values)
    for template in ours(manifests):
        if template.role == "kv":
            continue
        sleep_s = template.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        config = config_of(template, manifests, tmp_path)
        needed_s = sleep_s + config.router.drain_seconds + 2 * SERVER_GRACE_S + CLOSE_GRACE_S
        assert template.spec["terminationGracePeriodSeconds"] > needed_s


def test_a_pool_that_grows_starts_only_its_new_pods() -> None:
    few, many = render({"decode": {"replicas": 2}}), render({"decode": {"replicas": 9}})
    assert cluster_yaml(few) == cluster_yaml(many)
    shared = {"settings": {"decode": {"expert_parallel": True}}}
    assert cluster_yaml(render({**shared, "decode": {"replicas": 2}})) != cluster_yaml(
        render({**shared, "decode": {"replicas": 4}})
    )
    divided = {"settings": {"prefill": {"context_parallel": 2}}}
    assert cluster_yaml(render({**divided, "prefill": {"replicas": 2}})) != cluster_yaml(
        render({**divided, "prefill": {"replicas": 4}})
    )


def test_changed_settings_start_every_process_anew() -> None:
    def stamps(values: dict[str, Any]) -> dict[str, str]:
        return {each.role: each.metadata["annotations"]["checksum/config"] for each in ours(render(values))}

    before, after = stamps({}), stamps({"settings": {"fidelity": {"default": "exact"}}})
    assert before.keys() == after.keys() == {"router", "prefill", "decode", "kv"}
    assert not set(before.values()) & set(after.values())


# ---------------------------------------------------------------------------------------------------------- security


@cases
def test_no_pod_may_more_than_it_must(values: dict[str, Any]) -> None:
    manifests = render(values)
    templates = list(pod_templates(manifests))
    assert len(templates) >= 5
    for template in templates:
        spec, container = template.spec, template.container
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False, "WHALEPOD_DECODE_PORT=tcp://… would be read as a setting"
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (container, *spec.get("initContainers", [])):
            context = each["securityContext"]
            assert (context["readOnlyRootFilesystem"], context["allowPrivilegeEscalation"]) == (True, False)
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert each["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in each["resources"]["limits"]
            assert not each["image"].endswith((":latest", ":"))
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]} if "volumeMounts" in container else {}
        for volume in spec.get("volumes", []):
            if volume["name"] in mounts and not volume.keys() & {"emptyDir"}:
                assert mounts[volume["name"]].get("readOnly") is True, volume


@cases
def test_every_pod_has_a_policy_and_secrets_are_in_no_configuration(values: dict[str, Any]) -> None:
    manifests = render(values)
    policies = [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind(manifests, "NetworkPolicy")]
    for template in pod_templates(manifests):
        if template.role not in ("test", "ray-submitter"):
            assert any(selector.items() <= template.metadata["labels"].items() for selector in policies), template.role
    for manifest in of_kind(manifests, "ConfigMap"):
        assert "password" not in str(manifest).lower() or "dashboards" in manifest["metadata"]["name"]


def test_ranks_may_reach_a_store_outside_on_the_ports_of_its_urls() -> None:
    urls = {"url": "redis://cache:6390/0", "kvUrls": ["redis://[fd00::1]:6391/0", "redis://blocks/0"]}
    manifests = render({"redis": {"enabled": False, "external": urls}})
    for policy in of_kind(manifests, "NetworkPolicy"):
        if "Egress" in policy["spec"]["policyTypes"]:
            open_ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", ())]
            assert open_ports == [53, 53, 6390, 6391, 6379], policy["metadata"]["name"]


@cases
def test_network_policies_open_only_ports_on_which_a_rank_listens(values: dict[str, Any]) -> None:
    manifests = render(values)
    policies = {
        policy["metadata"]["labels"]["whalepod.io/role"]: policy for policy in of_kind(manifests, "NetworkPolicy")
    }
    for template in pod_templates(manifests):
        if template.role in ("prefill", "decode", "vision"):
            opened = [port for rule in policies[template.role]["spec"]["ingress"] for port in rule.get("ports", ())]
            assert {each["port"] for each in opened} == {each["containerPort"] for each in template.container["ports"]}


def test_each_process_of_a_router_has_an_operators_port_that_is_reached_and_scraped() -> None:
    manifests = render({"router": {"processes": 3}, "monitoring": {"serviceMonitor": {"enabled": True}}})
    named = {"admin": 8002, "admin-1": 8003, "admin-2": 8004}
    (router,) = [pod for pod in pod_templates(manifests) if pod.owner["metadata"]["name"].endswith("-router")]
    listens = {port["name"]: port["containerPort"] for port in router.spec["containers"][0]["ports"]}
    assert listens == {"http": 8000, "grpc": 8001, **named}
    (service,) = [each for each in of_kind(manifests, "Service") if each["metadata"]["name"].endswith("-admin")]
    assert {port["name"]: (port["port"], port["targetPort"]) for port in service["spec"]["ports"]} == {
        name: (port, name) for name, port in named.items()
    }
    (policy,) = [m for m in of_kind(manifests, "NetworkPolicy") if m["metadata"]["name"].endswith("-router")]
    assert [port["port"] for port in policy["spec"]["ingress"][-1]["ports"]] == list(named.values())
    (monitor,) = [m for m in of_kind(manifests, "ServiceMonitor") if m["metadata"]["name"].endswith("-router")]
    assert [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]] == list(named)
    assert yaml.safe_load(cluster_yaml(manifests))["router"]["processes"] == 3


def test_no_sleep_of_no_seconds_which_older_servers_refuse() -> None:
    (router,) = (each for each in ours(render({"router": {"preStopSeconds": 0}})) if each.role == "router")
    assert "lifecycle" not in router.container


def test_generated_secrets_are_long_enough_and_outlive_the_release() -> None:
    secrets = of_kind(render(), "Secret")
    assert len(secrets) == 2
    for secret in secrets:
        assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        (value,) = secret["data"].values()
        assert len(value) > 40
    given = {"clusterSecret": {"existingSecret": "a"}, "redis": {"auth": {"existingSecret": "b"}}}
    assert of_kind(render(given), "Secret") == []


# ------------------------------------------------------------------------------------------------------------- store


def redis_lines(values: dict[str, Any]) -> dict[str, str]:
    (conf,) = (m["data"]["redis.conf"] for m in of_kind(render(values), "ConfigMap") if "redis.conf" in m["data"])
    lines = [line.partition(" ") for line in conf.splitlines() if line and not line.startswith("#")]
    return {key: value for key, _, value in lines}


@pytest.mark.parametrize("policy", ["volatile-ttl", "noeviction", "any"])
def test_the_store_is_set_up_as_processes_check_it(policy: str) -> None:
    lines = redis_lines({"settings": {"kv": {"maxmemory_policy": policy}}})
    assert lines["maxmemory-policy"] == ("volatile-ttl" if policy == "any" else policy)
    assert lines["maxmemory"] != "0"


def test_a_real_server_takes_the_configuration_and_is_accepted(tmp_path: Path) -> None:
    assert accepted_by_the_store_check(redis_lines({}), find_redis_server(), tmp_path)
    assert not accepted_by_the_store_check(
        {**redis_lines({}), "maxmemory-policy": "allkeys-lru"}, find_redis_server(), tmp_path
    )


# ----------------------------------------------------------------------------------------------------------- metrics


def test_autoscalers_read_metrics_that_exist() -> None:
    known = known_series()
    hpas = of_kind(render(dict(CONTEXTS[2])), "HorizontalPodAutoscaler")
    assert len(hpas) == 3
    for hpa in hpas:
        assert hpa["spec"]["metrics"][0]["pods"]["metric"]["name"] in known
    pools = {
        name: {"replicas": 1, "autoscaling": {"enabled": True}} for name in ("router", "prefill", "decode", "vision")
    }
    scaled = of_kind(render({**pools, "autoscaling": {"kind": "keda"}}), "ScaledObject")
    assert len(scaled) == 4
    for each in scaled:
        query = each["spec"]["triggers"][0]["metadata"]["query"]
        (name,) = {word for word in query.replace("(", " ").replace("{", " ").split() if word.startswith("whalepod_")}
        assert name in known
        assert f"{each['metadata']['name']}-.*" in query


def test_a_workload_that_scales_by_itself_has_no_fixed_size() -> None:
    scaled = {
        m["spec"]["scaleTargetRef"]["name"] for m in of_kind(render(dict(CONTEXTS[2])), "HorizontalPodAutoscaler")
    }
    for manifest in render(dict(CONTEXTS[2])):
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            assert ("replicas" in manifest["spec"]) != (manifest["metadata"]["name"] in scaled)
