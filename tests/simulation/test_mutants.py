"""A simulation that lets a bug through is not done."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.planted_bug import ROOT, PlantedBug
from tests.simulation.mutants import noticed_by
from tests.simulation.planted_bugs import BUGS


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_has_its_place(bug: PlantedBug) -> None:
    source = (ROOT / bug.file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(bug.planted(source))) != ast.dump(ast.parse(source)), "the bug changes nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_some_seed_notices(bug: PlantedBug) -> None:
    assert noticed_by(bug) is not None
