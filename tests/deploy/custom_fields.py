"""Fields of the objects that no Kubernetes defines itself: KubeRay, Prometheus Operator, KEDA.

Written down by name from their references; only what this chart may use. `POD` is checked as a pod template, `ANY` is
text or numbers that the operator reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.deploy.rendering import Manifest, schema_errors

ANY, POD, SELECTOR, STRINGS = "any", "pod", "selector", "strings"

Fields = Mapping[str, Any]

GROUP: Fields = {"rayStartParams": STRINGS, "template": POD}
ENDPOINT: Fields = {
    "port": str, "path": str, "scheme": str, "interval": str, "scrapeTimeout": str, "honorLabels": bool,
    "relabelings": list, "metricRelabelings": list,
}  # fmt: skip
RULE: Fields = {
    "record": str, "alert": str, "expr": str, "for": str, "keep_firing_for": str, "labels": STRINGS,
    "annotations": STRINGS,
}  # fmt: skip

SPECS: Mapping[tuple[str, str], Fields] = {
    ("ray.io/v1", "RayCluster"): {
        "rayVersion": str,
        "suspend": bool,
        "enableInTreeAutoscaling": bool,
        "authOptions": {"mode": str},
        "headGroupSpec": {**GROUP, "serviceType": str, "enableIngress": bool},
        "workerGroupSpecs": [
            {**GROUP, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int, "numOfHosts": int}
        ],
    },
    ("ray.io/v1", "RayJob"): {
        "entrypoint": str,
        "runtimeEnvYAML": str,
        "jobId": str,
        "submissionMode": str,
        "clusterSelector": STRINGS,
        "submitterPodTemplate": POD,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "suspend": bool,
    },
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "selector": SELECTOR,
        "namespaceSelector": ANY,
        "jobLabel": str,
        "targetLabels": list,
        "podTargetLabels": list,
        "endpoints": [ENDPOINT],
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector": SELECTOR,
        "namespaceSelector": ANY,
        "jobLabel": str,
        "podTargetLabels": list,
        "podMetricsEndpoints": [ENDPOINT],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups": [{"name": str, "interval": str, "rules": [RULE]}]},
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef": {"apiVersion": str, "kind": str, "name": str},
        "pollingInterval": int,
        "cooldownPeriod": int,
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "triggers": [{"type": str, "metricType": str, "metadata": STRINGS}],
    },
}


def is_custom(manifest: Manifest) -> bool:
    return "." in manifest["apiVersion"] and not manifest["apiVersion"].partition("/")[0].endswith(".k8s.io")


def field_errors(manifest: Manifest, version: str) -> list[str]:
    """Unknown fields and wrong types of a custom object; pods inside it are held against Kubernetes' own schema."""
    fields = SPECS.get((manifest["apiVersion"], manifest["kind"]))
    if fields is None:
        return [f"{manifest['apiVersion']} {manifest['kind']}: nobody has written down its fields"]
    return list(_errors(manifest["spec"], fields, "spec", version))


def _errors(value: Any, expected: Any, path: str, version: str) -> Iterator[str]:
    match expected:
        case dict():
            for name, inner in value.items():
                if name in expected:
                    yield from _errors(inner, expected[name], f"{path}.{name}", version)
                else:
                    yield f"{path}.{name}: no such field"
        case [element]:
            for index, inner in enumerate(value):
                yield from _errors(inner, element, f"{path}.{index}", version)
        case type():
            if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
                yield f"{path}: {value!r} is no {expected.__name__}"
        case _ if expected == STRINGS:
            yield from (
                f"{path}.{name}: {inner!r} is no text" for name, inner in value.items() if not isinstance(inner, str)
            )
        case _ if expected == POD:
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": value}
            yield from (f"{path}: {error}" for error in schema_errors(pod, version))
        case _ if expected == SELECTOR:
            yield from (f"{path}.{name}: no such field" for name in set(value) - {"matchLabels", "matchExpressions"})
        case _:
            assert expected == ANY
