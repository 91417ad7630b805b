"""Play seeds, or one of them again with all that happens in it.

    python -m tests.simulation [--seed N] [--seeds COUNT] [--requests COUNT] [--first] [--verbose]

The last line is one JSON object; `digest` is of the last run. The exit status is 1 if a run was not well.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import Counter
from pathlib import Path

import whalepod.engine.rank
from tests.simulation.journal import LINES_KEPT
from tests.simulation.plans import ASKS, plan_run
from tests.simulation.report import figures_of, report_of
from tests.simulation.world import run_plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from there on")
    parser.add_argument("--requests", type=int, default=ASKS, help="of one run")
    parser.add_argument("--first", action="store_true", help="stop at the first that was not well")
    parser.add_argument("--verbose", action="store_true", help="print everything that happens")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    figures, wrong, digest = Counter[str](), list[int](), ""
    for seed in range(options.seed, options.seed + options.seeds):
        outcome = run_plan(plan_run(seed, asks=options.requests), lines_kept=None if options.verbose else LINES_KEPT)
        figures.update(seeds=1)
        figures.update(figures_of(outcome))
        if options.verbose or outcome.wrong:
            sys.stdout.write(report_of(outcome) + "\n")
        if outcome.wrong:
            wrong.append(seed)
        digest = outcome.digest
        if outcome.wrong and options.first:
            break
    sources = str(Path(whalepod.engine.rank.__file__).parent)
    last = {
        "sources": sources,
        **figures,
        "wrong": len(wrong),
        "first_wrong": next(iter(wrong), None),
        "digest": digest,
    }
    sys.stdout.write(json.dumps(last) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
