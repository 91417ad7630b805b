"""The chart rendered, as data: what Helm would send to a cluster."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import yaml
from referencing import Registry, Resource

from tests.house_rules import ROOT

CHART = ROOT / "deploy/k8s/whalepod"
EXAMPLES: Mapping[str, dict[str, Any]] = {
    "defaults": {},
    **{
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "deploy/k8s/examples").glob("*.yaml"))
        if not path.stem.startswith("job-")
    },
}
KUBERNETES_VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
RELEASE_NAMES = ("demo", "whalepod", "my-whalepod-2", "a", "a-release-with-a-name-of-fifty-three-characters-12345")
NAMESPACE = "serving"
POD_KINDS = ("Deployment", "StatefulSet", "Pod", "RayCluster", "RayJob")

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A pod that an object of the chart makes. `role` is what its label says."""

    owner: Manifest
    metadata: Manifest
    spec: Manifest

    @property
    def role(self) -> str:
        return self.metadata["labels"]["whalepod.io/role"]

    @property
    def container(self) -> Manifest:
        (container,) = self.spec["containers"]
        return container


@functools.cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render(values: Mapping[str, Any] | None = None, *, name: str = "demo") -> list[Manifest]:
    """Every object, in the order of its file. Raises HelmError where Helm would refuse."""
    files = chart().render(dict(values or {}), name=name, namespace=NAMESPACE)
    return [
        manifest
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for manifest in yaml.load_all(text, Loader=LOADER)
        if manifest
    ]


LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """Later values over earlier ones, maps key by key, as Helm does it."""
    result: dict[str, Any] = {}
    for each in values:
        for key, value in each.items():
            before = result.get(key)
            both = isinstance(before, dict) and isinstance(value, dict)
            result[key] = merged(before, value) if both else value  # pyright: ignore[reportArgumentType]
    return result


def pod_templates(manifests: list[Manifest]) -> Iterator[PodTemplate]:
    for owner in manifests:
        spec = owner.get("spec", {})
        match owner["kind"]:
            case "Deployment" | "StatefulSet":
                yield PodTemplate(owner, spec["template"]["metadata"], spec["template"]["spec"])
            case "Pod":
                yield PodTemplate(owner, owner["metadata"], spec)
            case "RayCluster":
                for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                    yield PodTemplate(owner, group["template"]["metadata"], group["template"]["spec"])
            case "RayJob":
                template = spec["submitterPodTemplate"]
                yield PodTemplate(owner, template["metadata"], template["spec"])
            case _:
                pass


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def cluster_yaml(manifests: list[Manifest]) -> str:
    """The configuration that all processes of the release read."""
    (text,) = (m["data"]["cluster.yaml"] for m in of_kind(manifests, "ConfigMap") if "cluster.yaml" in m["data"])
    return text


def schema_errors(manifest: Manifest, version: str) -> list[str]:
    """What the API server of a Kubernetes version refuses of an object of its own kinds, unknown fields included."""
    group, _, api = manifest["apiVersion"].rpartition("/")
    validator = _validator(manifest["kind"], group.partition(".")[0], api, version)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(manifest)]


@functools.cache
def _validator(kind: str, group: str, api: str, version: str) -> Any:
    name = "-".join(part for part in (kind.lower(), group, api) if part)
    own, definitions = _schema_file(version, f"{name}.json"), _schema_file(version, "_definitions.json")
    registry: Any = Resource.from_contents(definitions) @ (Resource.from_contents(own) @ Registry())
    return jsonschema.Draft202012Validator(own, registry=registry)


@functools.cache
def _schema_file(version: str, name: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return json.loads(Path(str(folder / name)).read_text(encoding="utf-8"))
