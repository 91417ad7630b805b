"""What the chart's objects name of each other, and what of it is not there: a hard-coded name breaks under another
release's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from tests.deploy.rendering import NAMESPACE, Manifest, of_kind, pod_templates

KIND_OF_KEY = {
    "serviceAccountName": "ServiceAccount",
    "serviceName": "Service",
    "secretName": "Secret",
    "claimName": "PersistentVolumeClaim",
    "ray.io/cluster": "RayCluster",
}
"""A string under this key is a name."""
KIND_OF_MAP = {
    "configMap": "ConfigMap",
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
    "service": "Service",
}
"""The `name` in a map under this key."""
FULL_HOST = re.compile(rf"([a-z0-9{{}}-]+(?:\.[a-z0-9{{}}-]+)*)\.{NAMESPACE}\.svc\b")
SHORT_HOST = re.compile(r"([a-z][a-z0-9-]*):\d+")


def dangling(manifests: list[Manifest], *, given: Collection[str]) -> Iterator[str]:
    """A line for each reference to what is neither rendered nor `given` (the operator's own), and for each selector
    that finds nothing."""
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    made |= {("Secret", name) for kind, name in made if kind == "RayCluster"}  # its token, which the operator makes
    pools = [name for kind, name in made if kind == "StatefulSet"]
    for manifest in manifests:
        where = f"{manifest['kind']} {manifest['metadata']['name']}"
        for kind, name in (*_named(manifest), *_hosts(manifest, pools)):
            if (kind, name) not in made and name not in given:
                yield f"{where} names {kind} {name}, which is not there"
        if not _selects_something(manifest, manifests):
            yield f"{where} selects nothing"


def _named(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for each in value:
            yield from _named(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key in KIND_OF_KEY and isinstance(each, str):
                yield KIND_OF_KEY[key], each
            elif key in KIND_OF_MAP and isinstance(each, dict) and "name" in each:
                yield KIND_OF_MAP[key], each["name"]
            elif key == "scaleTargetRef":
                yield each["kind"], each["name"]
            yield from _named(each)


def _hosts(value: Any, pools: list[str]) -> Iterator[tuple[str, str]]:
    """Services, and StatefulSets of single pods, in whatever is written somewhere."""
    if isinstance(value, list | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "image":
                yield from _hosts(each, pools)
    elif isinstance(value, str):
        short = SHORT_HOST.fullmatch(value)
        if short is not None:
            yield "Service", short[1]
        for host in FULL_HOST.findall(value):
            *pod, service = host.split(".")
            if "{pool}" in service:
                prefix = service.replace("{pool}", "")
                assert any(pool.startswith(prefix) for pool in pools), host
                continue
            yield "Service", service
            yield from (("StatefulSet", name.rpartition("-")[0]) for name in pod)


def _selects_something(manifest: Manifest, manifests: list[Manifest]) -> bool:
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "Service":
            wanted, found = spec.get("selector") or {}, _pods(manifests)
        case "PodDisruptionBudget" | "Deployment" | "StatefulSet" | "PodMonitor":
            wanted, found = spec["selector"].get("matchLabels", {}), _pods(manifests)
        case "NetworkPolicy":
            wanted, found = spec["podSelector"].get("matchLabels", {}), _pods(manifests)
        case "ServiceMonitor":
            services = of_kind(manifests, "Service")
            wanted, found = spec["selector"]["matchLabels"], [each["metadata"]["labels"] for each in services]
        case _:
            return True
    return any(wanted.items() <= labels.items() for labels in found)


def _pods(manifests: list[Manifest]) -> list[dict[str, str]]:
    return [template.metadata["labels"] for template in pod_templates(manifests)]
