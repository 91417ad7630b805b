"""`values.schema.json` of the chart, made from its `values.yaml` and, for `settings`, from the model of all settings
(`make docs` writes it).

Every key must be known. What Kubernetes itself defines (tolerations, volumes, …) is left to Kubernetes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from tests.house_rules import ROOT
from whalepod.cluster.config import ROUTER_PROCESSES_MAX, ClusterConfig

CHART = ROOT / "deploy/k8s/whalepod"
SCHEMA_FILE = CHART / "values.schema.json"

OWNED: Mapping[str, frozenset[str]] = {
    "": frozenset(
        {
            "model", "served_model_name", "secret", "secret_file", "host", "advertise_host", "ranks_apart", "rank_host",
            "redis_url", "redis_port", "redis_memory_mib", "tls", "ray",
        }
    ),
    "prefill": frozenset({"replicas", "port", "gpus"}),
    "decode": frozenset({"replicas", "port", "gpus"}),
    "vision": frozenset({"replicas", "port", "gpus"}),
    "router": frozenset(
        {
            "http_port", "grpc_port", "admin_port", "processes", "drain_seconds", "api_keys_file", "prefill", "decode",
            "vision",
        }
    ),
    "kv": frozenset({"port", "urls"}),
}  # fmt: skip
"""Settings that the chart sets itself, by section: not to be set by `settings`."""

PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT = {"type": "integer", "minimum": 0}
NARROWER: Mapping[str, Mapping[str, Any]] = {
    "autoscaling.kind": {"enum": ["hpa", "keda"]},
    "decode.replicas": {"type": "integer", "minimum": 1},
    "redis.shards": {"type": "integer", "minimum": 1},
    "router.replicas": {"type": "integer", "minimum": 1},
    "router.processes": {"type": "integer", "minimum": 1, "maximum": ROUTER_PROCESSES_MAX},
    "router.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "redis.image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "image.tag": {"type": "string", "not": {"const": "latest"}},
    "redis.image.tag": {"type": "string", "not": {"const": "latest"}},
    "clusterSecret.key": {"type": "string", "minLength": 1},
}
QUANTITY_OR_COUNT = ("maxUnavailable",)
OPEN = ("resources", "submitterResources", "podSecurityContext", "securityContext", "labels")
"""Objects of Kubernetes that have defaults here."""


def values_schema() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = _schema_of(values, "")
    settings = ClusterConfig.model_json_schema()
    definitions = settings.pop("$defs")
    schema["properties"]["settings"] = _without_owned(settings, OWNED[""])
    for section, owned in OWNED.items():
        if section:
            name = settings["properties"][section]["$ref"].rpartition("/")[2]
            definitions[name] = _without_owned(definitions[name], owned)
    used = {
        name: _bare(definition)
        for name, definition in definitions.items()
        if name not in ("RaySettings", "TlsSettings")
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart whalepod",
        **schema,
        "$defs": used,
    }


def _schema_of(value: Any, path: str) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    if path in NARROWER:
        return dict(NARROWER[path])
    if name in QUANTITY_OR_COUNT:
        return {"type": ["integer", "string"]}
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return dict(PORT if name.lower().endswith("port") or ".ports." in path else COUNT)
        case str():
            return {"type": "string"}
        case list():
            return {"type": "array"}
        case dict() if not value or name in OPEN:
            return {"type": "object"}
        case _:
            inner = {key: _schema_of(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
            # Helm hands the values of a parent chart down under this name.
            extra = {} if path else {"global": {"type": "object"}}
            return {"type": "object", "additionalProperties": False, "properties": {**inner, **extra}}


def _without_owned(section: dict[str, Any], owned: frozenset[str]) -> dict[str, Any]:
    kept = {name: field for name, field in section["properties"].items() if name not in owned}
    return _bare({**section, "properties": kept})


def _bare(node: Any) -> Any:
    """Without the defaults, which are the program's business, and the titles, which repeat names."""
    if isinstance(node, dict):
        is_schema = "properties" not in node or not isinstance(node["properties"], dict)
        dropped = ("default", "title", "format") if is_schema or "type" in node else ()
        return {
            key: {name: _bare(field) for name, field in item.items()} if key == "properties" else _bare(item)
            for key, item in node.items()
            if key not in dropped
        }
    return [_bare(item) for item in node] if isinstance(node, list) else node


def text() -> str:
    return json.dumps(values_schema(), indent=1) + "\n"
