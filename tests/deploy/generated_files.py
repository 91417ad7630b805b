"""Files of `deploy/` that are made from the code: `make docs` writes them (`tests/docs_tables.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.deploy.grafana import DASHBOARDS, DASHBOARDS_DIR, dashboard_text
from tests.deploy.prometheus_rules import RULES_FILE, rules_text
from tests.deploy.values_schema import SCHEMA_FILE, text


def generated_files() -> Mapping[Path, str]:
    """What each file should hold."""
    dashboards = {DASHBOARDS_DIR / f"{name}.json": dashboard_text(name) for name in DASHBOARDS}
    return {SCHEMA_FILE: text(), RULES_FILE: rules_text(), **dashboards}


def write_generated_files() -> None:
    for path, content in generated_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
