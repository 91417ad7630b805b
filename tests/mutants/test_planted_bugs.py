from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.planted_bug import ROOT, PlantedBug
from tests.mutants.planted_bugs import BUGS


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_has_its_place_and_stays_python_or_c(bug: PlantedBug) -> None:
    source = (ROOT / bug.file).read_text(encoding="utf-8")
    mutant = bug.planted(source)
    if bug.compiled:
        assert mutant.count("{") == mutant.count("}"), "whether it compiles, `make mutants` sees"
        return
    ast.parse(mutant)
    assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(source)), "the bug changes nothing"


def test_bugs_have_names_of_their_own() -> None:
    assert max(Counter(bug.name for bug in BUGS).values()) == 1
    assert len(BUGS) >= 15
