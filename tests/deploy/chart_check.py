"""`make chart-test`: every example, release name and Kubernetes version, and every leaf of the values.

Prints what is wrong, and last one JSON object: renders, invalid, leaves_without_effect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import helm_python
from rich.console import Console

from tests.deploy.custom_fields import field_errors, is_custom
from tests.deploy.rendering import CHART, EXAMPLES, KUBERNETES_VERSIONS, RELEASE_NAMES, render, schema_errors
from tests.deploy.value_leaves import leaves_without_effect

HELM_WARNING = 2
FULLNAME: dict[str, Any] = {"fullnameOverride": "another-name"}


@dataclass(slots=True)
class Figures:
    renders: int = 0
    invalid: int = 0
    leaves_without_effect: int = 0


def lint_errors(values: dict[str, Any]) -> list[str]:
    """What a strict `helm lint` complains of."""
    report = helm_python.lint(CHART, values, strict=True, namespace="serving")
    messages = [message["error"] for message in report["messages"] if message["severity"] >= HELM_WARNING]
    return [*messages, *report["errors"]]


def invalid_objects(versions: Sequence[str], names: Sequence[str], *, count: Figures) -> Iterator[str]:
    """A line for each object of each rendering that an API server would refuse, or that is there twice."""
    for example, values in EXAMPLES.items():
        for name, extra in [*((name, {}) for name in names), ("demo", FULLNAME)]:
            manifests = render({**values, **extra}, name=name)
            count.renders += 1
            made = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
            yield from (f"{example}, {name}: {twice} is there twice" for twice in set(made) if made.count(twice) > 1)
            for version in versions:
                for manifest in manifests:
                    errors = (field_errors if is_custom(manifest) else schema_errors)(manifest, version)
                    where = (
                        f"{example}, {name}, Kubernetes {version}: {manifest['kind']} {manifest['metadata']['name']}"
                    )
                    yield from (f"{where}: {error}" for error in errors)


def main() -> None:
    console, figures = Console(highlight=False, soft_wrap=True), Figures()
    wrong = [f"lint of {example}: {error}" for example, values in EXAMPLES.items() for error in lint_errors(values)]
    wrong += invalid_objects(KUBERNETES_VERSIONS, RELEASE_NAMES, count=figures)
    unused = leaves_without_effect()
    for line in (*wrong, *(f"{leaf} changes nothing" for leaf in unused)):
        console.print(line)
    figures.invalid, figures.leaves_without_effect = len(wrong), len(unused)
    console.print(
        json.dumps(
            {
                "renders": figures.renders,
                "invalid": figures.invalid,
                "leaves_without_effect": figures.leaves_without_effect,
            }
        )
    )
    sys.exit(bool(wrong or unused))


if __name__ == "__main__":
    main()
