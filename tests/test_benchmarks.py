"""Every benchmark of a whole cluster runs to its end, small, and its last line has the figures that are promised."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.house_rules import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = {
    "ep_failover.py --ranks 2 --streams 4 --tokens 200": {"streams", "in_place", "broken", "pause_s"},
    "failover.py --streams 4 --victims decode-0": {"streams", "broken", "different", "pause_ms_p50", "blocks_leaked"},
    "router.py --part first --requests 20": {"added_ttft_ms_p50_c1"},
    "placement.py --trace synthetic --requests 300": {
        "hit_of_ideal",
        "load_max_over_mean",
        "goodput_over_cost_function",
    },
    "kv.py --blocks 64 --rounds 1": {"set_gbs", "get_gbs", "get_over_raw"},
}


@pytest.mark.parametrize("command", SMALL)
def test_it_ends_with_its_figures(command: str) -> None:
    run = subprocess.run(
        [sys.executable, *f"benchmarks/{command}".split()],
        cwd=ROOT, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures.keys() >= SMALL[command]
    assert figures.get("broken", 0) == figures.get("different", 0) == 0
