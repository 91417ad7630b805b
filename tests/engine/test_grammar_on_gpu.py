"""Answers that follow a grammar, drawn on a GPU beside answers that are free. Skipped without one; run it in a process
of its own (Triton's interpreter). `WHALEPOD_GRAMMAR_DEVICE=cpu` tries the test itself without one."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch

from whalepod.cluster.shipped_model import shipped_model_dir
from whalepod.engine.interface import Fidelity
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams

DEVICE = os.environ.get("WHALEPOD_GRAMMAR_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and (not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="needs a GPU",
)
SCHEMA = {
    "type": "object",
    "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 999}, "kind": {"enum": ["whale", "squid"]}},
    "required": ["depth", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_guided_answers_keep_to_their_grammar_and_leave_free_ones_alone(draft_tokens: int) -> None:
    llm = LLM(
        shipped_model_dir(), device=DEVICE, context_tokens_max=1024, draft_tokens=draft_tokens, fidelity=Fidelity.EXACT
    )
    free = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True) for _ in range(2)]
    guided = [
        SamplingParams(seed=3, max_tokens=48, so_args={"schema_type": "json", "schema": SCHEMA}),
        SamplingParams(temperature=0, max_tokens=48, so_args={"schema_type": "regex", "schema": "[0-9]{3}-[a-f]{2,6}"}),
    ]
    prompts = ["The whale sings."] * 4
    try:
        alone = [answer.outputs[0].token_ids for answer in llm.generate(prompts[:2], free)]
        answers = llm.generate(prompts, [*free, *guided])
    finally:
        llm.close()
    assert [answer.outputs[0].token_ids for answer in answers[:2]] == alone
    told = json.loads(answers[2].outputs[0].text)
    assert set(told) == {"depth", "kind"} and 0 <= told["depth"] <= 999 and told["kind"] in ("whale", "squid")
    assert re.fullmatch("[0-9]{3}-[a-f]{2,6}", answers[3].outputs[0].text)
