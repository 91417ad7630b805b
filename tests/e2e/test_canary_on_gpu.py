"""What one process says and what a cluster says, both on a GPU: prompts computed by one rank, handed off through Redis,
answered by another. Skipped without a GPU; run in a process of its own, because other tests switch Triton's interpreter
on. `WHALEPOD_CANARY_DEVICE=cpu` tries the test itself without one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.pod_processes import pod_processes
from whalepod.cli.canary import passed
from whalepod.cluster.canary import CanaryPlan, run_canary
from whalepod.cluster.canary_report import CanaryReport
from whalepod.cluster.shipped_model import shipped_model_dir
from whalepod.engine.interface import Fidelity, SampledToken
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams

DEVICE = os.environ.get("WHALEPOD_CANARY_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    (DEVICE == "cuda" and not torch.cuda.is_available()) or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs a GPU",
)
PLANS = [CanaryPlan(requests=24, fidelity=Fidelity.EXACT, warm=warm) for warm in (False, True)]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(shipped_model_dir(), fidelity=Fidelity.EXACT, context_tokens_max=4096, device=DEVICE, draft_tokens=0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("role", "drafts"), [("full", 5), ("encoder", 0)])
def test_a_cluster_says_what_one_process_says_bit_for_bit(role: str, drafts: int, llm: LLM, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "engine": {"device": DEVICE, "context_tokens_max": 4096},
        "prefill": {"role": role},
        "router": {"remote_prefill": "always"},
        "dspark": {"draft_tokens": drafts},
        "kv": {"node_cache_dir": str(tmp_path / "cache"), "node_cache_mib": 0},
    }

    def oracle(
        prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> Sequence[Sequence[SampledToken]]:
        return [output.output.tokens for output in llm.generate(prompts, sampling)]

    async def compare() -> list[CanaryReport]:
        async with pod_processes(tmp_path, settings) as config:
            return [await run_canary(config, plan, oracle, say=lambda _: None) for plan in PLANS]

    for plan, report in zip(PLANS, asyncio.run(compare()), strict=True):
        assert passed(report, plan), (report.figures(), report.errors)
        assert report.handed_off >= plan.requests // 2
