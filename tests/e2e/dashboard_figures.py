"""`make dashboard-test`: the tests of the dashboard; the last line is one JSON object: checks, failed.

Pictures of it are kept where WHALEPOD_ARTEFACTS says, or in `build/dashboard`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.house_rules import ROOT


class Count:
    """A pytest plugin that counts."""

    def __init__(self) -> None:
        self.checks = 0
        self.failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.checks += report.when == "call"
        self.failed += report.failed


def main() -> None:
    console = Console(highlight=False, soft_wrap=True)
    if shutil.which("chromium") is None:
        console.print("chromium is not installed; on Debian: apt-get install chromium")
        sys.exit(2)
    pictures = Path(os.environ.setdefault("WHALEPOD_ARTEFACTS", str(ROOT / "build/dashboard")))
    pictures.mkdir(parents=True, exist_ok=True)
    count = Count()
    files = [
        "tests/e2e/test_dashboard.py",
        "tests/services/router/test_dashboard.py",
        "tests/services/router/test_operator_actions.py",
    ]
    code = pytest.main(["-q", "-m", "", *files], plugins=[count])
    console.print(json.dumps({"checks": count.checks, "failed": count.failed}))
    sys.exit(int(code))


if __name__ == "__main__":
    main()
