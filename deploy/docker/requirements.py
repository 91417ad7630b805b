"""Prints what `pyproject.toml` here needs to be built and to run, with the extras that are named."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
for extra in sys.argv[1:]:
    wanted += project["project"]["optional-dependencies"][extra]
sys.stdout.write("\n".join(wanted) + "\n")
