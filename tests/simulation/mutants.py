"""Plants one bug after the other into a copy of the sources, and plays seeds until one of them notices.

    python -m tests.simulation.mutants [WORD…]      only bugs with one of these words in their names

The last line is one JSON object: how many bugs, how many were caught, and by which seed each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutants.planted_bug import ROOT, PlantedBug
from tests.mutants.run import copy_sources
from tests.simulation.planted_bugs import BUGS

SEEDS_MAX = 50
"""A bug that none of so many notices is not caught."""
LIMIT_S = 400


def noticed_by(bug: PlantedBug, *, seeds: int = SEEDS_MAX) -> tuple[int, str] | None:
    """The first seed that notices the bug, and what it says; None if all are well."""
    with tempfile.TemporaryDirectory(prefix="whalepod-mutant-") as directory:
        copy_sources(Path(directory), bug)
        played = subprocess.run(
            [sys.executable, "-B", "-m", "tests.simulation", "--seeds", str(seeds), "--first"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(directory) / "src"), str(ROOT)))},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    lines = played.stdout.splitlines()
    assert lines, f"{bug.name}: the simulation did not run: {played.stderr[-500:]}"
    figures = json.loads(lines[-1])
    assert figures["sources"].startswith(directory), f"played {figures['sources']}, not the copy"
    return (figures["first_wrong"], lines[-2].strip()) if figures["wrong"] else None


def main() -> int:
    caught: dict[str, int] = {}
    chosen = [bug for bug in BUGS if not sys.argv[1:] or any(word in bug.name for word in sys.argv[1:])]
    for bug in chosen:
        noticed = noticed_by(bug)
        if noticed is not None:
            caught[bug.name] = noticed[0]
        what = "nothing" if noticed is None else f"seed {noticed[0]}: {noticed[1]}"
        sys.stdout.write(f"{bug.name}: {what[:160]}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"mutants": len(chosen), "caught": len(caught), "seeds": caught}) + "\n")
    return int(len(caught) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
