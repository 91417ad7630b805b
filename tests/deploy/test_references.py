"""No object of the chart names another that is not there, whatever the release is called."""

from __future__ import annotations

import pytest

from tests.deploy.chart_check import FULLNAME
from tests.deploy.references import dangling
from tests.deploy.rendering import EXAMPLES, RELEASE_NAMES, of_kind, render
from tests.deploy.value_leaves import leaves


@pytest.mark.parametrize("example", EXAMPLES)
def test_fault_f10_every_reference_finds_its_object_under_any_name(example: str) -> None:
    values = EXAMPLES[example]
    given = {value for _, value in leaves(values) if isinstance(value, str)}
    for name, extra in [*((name, {}) for name in RELEASE_NAMES), ("demo", FULLNAME)]:
        assert list(dangling(render({**values, **extra}, name=name), given=given)) == [], name


@pytest.mark.parametrize(
    ("kind", "name", "noticed"),
    [
        ("ConfigMap", "config", "names ConfigMap"),
        ("Secret", "cluster", "names Secret"),
        ("Service", "redis", "names Service"),
        ("StatefulSet", "redis", "names StatefulSet"),
        ("Service", "admin", "names Service"),
        ("Deployment", "router", "selects nothing"),
    ],
)
def test_an_object_that_is_missing_is_noticed(kind: str, name: str, noticed: str) -> None:
    manifests = render()
    (missing,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"].endswith(f"-{name}"))
    manifests.remove(missing)
    assert any(noticed in line for line in dangling(manifests, given=()))
