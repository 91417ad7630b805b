"""Every leaf of the chart's values, something else to set it to, and circumstances in which it should matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from helm_python import HelmRenderError

from tests.deploy.rendering import NAMESPACE, chart, merged

Path_ = tuple[str, ...]

ALL_MONITORING = {
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")}
}
CONTEXTS: tuple[Mapping[str, Any], ...] = (
    {
        **ALL_MONITORING,
        "vision": {"replicas": 1},
        "redis": {"shards": 2},
        "model": {"volume": {"emptyDir": {}}},
        "router": {"ingress": {"enabled": True}, "apiKeys": {"existingSecret": "keys"}},
    },
    {"router": {"tls": {"existingSecret": "tls", "clientCaKey": "ca.crt"}}},
    {name: {"autoscaling": {"enabled": True}} for name in ("router", "prefill", "decode")},
    {"autoscaling": {"kind": "keda"}, "vision": {"replicas": 1, "autoscaling": {"enabled": True}}},
    {"ray": {"enabled": True}},
    {"redis": {"enabled": False, "external": {"url": "redis://store:6379/0"}}},
    {"redis": {"enabled": False, "external": {"existingSecret": "store", "kvUrlsKey": "shards"}}},
    {"serviceAccount": {"create": False}},
    {
        "settings": {"engine": {"device": "cuda"}},
        **{pool: {"replicas": 1, "gpus": 1} for pool in ("prefill", "decode", "vision")},
    },
    {"peerTls": {"existingSecret": "peers", "name": "whalepod"}},
)
OTHER_VALUES: Mapping[str, Any] = {
    "settings": {"fidelity": {"default": "exact"}},
    "image.pullPolicy": "Always",
    "redis.image.pullPolicy": "Always",
    "router.service.type": "NodePort",
    "autoscaling.kind": "keda",
    "model.volume": {"hostPath": {"path": "/data"}},
    "clusterDomain": "example.internal",
    "redis.external.kvUrls": ["redis://another:6379/0"],
    "redis.external.url": "redis://another:6379/0",
}
OTHER_BY_NAME: Mapping[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
    "extraArgs": ["--log-level=debug"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "clientsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "monitoringFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "drop": ["NET_RAW"],
}


def leaves(values: Mapping[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield (*path, key), value


def other_value(path: Path_, value: Any) -> Any:
    """Something else that the schema allows at `path`."""
    dotted = ".".join(path)
    if dotted in OTHER_VALUES:
        return OTHER_VALUES[dotted]
    if path[-1] in OTHER_BY_NAME:
        return OTHER_BY_NAME[path[-1]]
    match value:
        case bool():
            return not value
        case int():
            return value + 10
        case str():
            return value + "x"
        case _:
            return {"some": "thing"}


def with_leaf(values: Mapping[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return merged(values, value)


def leaves_without_effect() -> list[str]:
    """Leaves that change nothing of what is rendered, whatever else is set."""
    defaults = chart().values
    rendered = [_text(context) for context in CONTEXTS]
    return [
        ".".join(path)
        for path, _ in leaves(defaults)
        if not any(
            _text(with_leaf(context, path, other_value(path, _value_at(merged(defaults, context), path))))
            not in (before, None)
            for context, before in zip(CONTEXTS, rendered, strict=True)
        )
    ]


def _value_at(values: Any, path: Path_) -> Any:
    for key in path:
        values = values[key]
    return values


def _text(values: Mapping[str, Any]) -> str | None:
    """What is rendered, without the secrets that are made anew each time. None: the chart refuses these values."""
    try:
        files = chart().render(dict(values), name="demo", namespace=NAMESPACE)
    except HelmRenderError:
        return None
    texts = (
        re.sub(r': "[A-Za-z0-9+/=]*"$', "", text, flags=re.MULTILINE) if "/secret-" in path else text
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
    )
    return "\n".join(texts)
