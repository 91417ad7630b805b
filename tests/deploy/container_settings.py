"""What a rendered container is told, read by the program's own parsers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.deploy.rendering import Manifest, PodTemplate, cluster_yaml
from whalepod.cli.main import load_command
from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import load_config, settings

FIELDS: Mapping[str, str] = {"status.podIP": "10.1.2.3", "metadata.labels['apps.kubernetes.io/pod-index']": "0"}
SECRET_VALUES: Mapping[str, str] = {"redis-url": "redis://:hush@store.example:6379/0"}
OUR_COMMANDS = ("router", "prefill", "decode", "vision", "kv")


def environment(container: Manifest, *, fields: Mapping[str, str] = FIELDS) -> dict[str, str]:
    """The variables as the container sees them; secrets are made up."""
    values: dict[str, str] = {}
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            value = fields[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            value = SECRET_VALUES.get(source["secretKeyRef"]["key"], "hush")
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], variable["value"])
        values[variable["name"]] = value
    return values


def config_of(template: PodTemplate, manifests: list[Manifest], directory: Path) -> ClusterConfig:
    """The settings with which the container's process starts. Raises ConfigError as it would."""
    file = directory / "cluster.yaml"
    file.write_text(cluster_yaml(manifests), encoding="utf-8")
    return load_config(file=file, variables=environment(template.container), flags={})


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Name and parameters of the command that `words` (without `whalepod`) run. Raises on unknown flags."""
    command: Any = load_command(words[0])
    names, rest = words[:1], words[1:]
    while hasattr(command, "commands"):
        command, names, rest = command.commands[rest[0]], [*names, rest[0]], rest[1:]
    return " ".join(names), command.make_context(names[-1], list(rest)).params


def known_variables() -> set[str]:
    return {setting.variable for setting in settings()} | {"WHALEPOD_INDEX", "WHALEPOD_CONFIG", "WHALEPOD_API_KEY"}
