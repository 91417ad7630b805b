"""What a rank's first requests wait for, with the warm-up before them and without.

    python benchmarks/warm_up.py [--model DIR] [--device cuda] [--slots N] [--at-once]

Each rank is a process of its own whose kernels nobody has compiled. It answers one request, then eight at once, then
both again: that is what they take when everything is there. The last line is one JSON object: of each rank the seconds
of its warm-up and of those answers until their first tokens, and `first_over_later`, the first request's over the same
one's later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import RequestId, mint_request_id
from whalepod.engine.interface import EngineRequest, Fidelity, FinishedEvent, StepEvent, TokensEvent, Work
from whalepod.engine.options import RankOptions
from whalepod.engine.rank import EngineRank
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.measuring import random_prompts
from whalepod.engine.speculation.options import SpeculationOptions, speculation_for

SHIPPED = Path(__file__).parents[1] / "models/whalepod-tiny"
PROMPT_TOKENS, ANSWER_TOKENS, TOGETHER = 300, 24, 8
PATIENCE_S = 600.0


class Rank:
    """One that serves, and what it has said."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.model = RankModel.load(asked.model, device=asked.device)
        speculation = speculation_for(
            self.model.config,
            SpeculationOptions(),
            draft_tokens=None,
            cost_table=None,
            temperature_table=None,
            directory=asked.model,
        )
        options = RankOptions(slots=asked.slots, speculation=speculation)
        self.engine = EngineRank(self.model, options, store=None, on_step=self._on_step)
        self._said = threading.Condition()
        self._first_s: dict[RequestId, float] = {}
        self._ended = 0

    def answer(self, count: int) -> float:
        """Seconds until each of so many requests has its first token."""
        self._first_s, self._ended = {}, 0
        started_s = SYSTEM_CLOCK.monotonic_s()
        for prompt in random_prompts(self.model, count, tokens=PROMPT_TOKENS, seed=count):
            self.engine.submit(
                EngineRequest(
                    request_id=mint_request_id(),
                    attempt=1,
                    prompt_ids=prompt,
                    sampling=SamplingParams(temperature=1, seed=1, max_tokens=ANSWER_TOKENS, ignore_eos=True),
                    fidelity=Fidelity.FAST,
                    deadline=Deadline.after(PATIENCE_S),
                )
            )
        with self._said:
            assert self._said.wait_for(lambda: self._ended == count, timeout=PATIENCE_S)
        return max(self._first_s.values()) - started_s

    def _on_step(self, events: Sequence[StepEvent]) -> None:
        now_s = SYSTEM_CLOCK.monotonic_s()
        with self._said:
            for event in events:
                if isinstance(event, FinishedEvent):
                    assert event.error is None, event.error
                    self._ended += 1
                elif isinstance(event, TokensEvent):
                    self._first_s.setdefault(event.request_id, now_s)
            self._said.notify_all()


def measure(asked: argparse.Namespace) -> dict[str, float]:
    """One rank, in this process."""
    rank, clock = Rank(asked), SYSTEM_CLOCK
    started_s = clock.monotonic_s()
    if asked.warm == "on":
        rank.engine.warm_up(Work.GENERATE, (Fidelity.FAST,))
    figures = {"warm_up_s": clock.monotonic_s() - started_s}
    rank.engine.start()
    for name in ("first", "later"):
        figures[f"one_{name}_s"] = rank.answer(1)
        figures[f"eight_{name}_s"] = rank.answer(TOGETHER)
    rank.engine.stop()
    return {name: round(seconds, 4) for name, seconds in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, where there is nothing to compile")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--at-once", action="store_true", help="both ranks beside each other: quicker, and less exact")
    parser.add_argument("--warm", choices=("on", "off"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.warm is not None:
        print(json.dumps(measure(asked)))
        return
    machine = torch.cuda.get_device_name() if asked.device.startswith("cuda") else platform.machine()
    print(f"{machine}, torch {torch.__version__}, {asked.model.name}, {asked.slots} slots")
    with tempfile.TemporaryDirectory() as directory:
        ranks = {}
        for warm in ("off", "on"):
            words = [sys.executable, __file__, "--model", str(asked.model), "--device", asked.device]
            words += ["--slots", str(asked.slots), "--warm", warm]
            cache = {
                "TRITON_CACHE_DIR": f"{directory}/{warm}",
                "TORCHINDUCTOR_CACHE_DIR": f"{directory}/{warm}-inductor",
            }
            ranks[warm] = subprocess.Popen(words, env=os.environ | cache, stdout=subprocess.PIPE, text=True)
            if not asked.at_once:
                ranks[warm].wait()
        told = {warm: rank.communicate()[0] for warm, rank in ranks.items()}
    figures = {f"warm_up_{warm}": json.loads(text.splitlines()[-1]) for warm, text in told.items()}
    for name, figure in figures.items():
        print(name, *(f"{what} {seconds:.3f}" for what, seconds in figure.items()))
        figure["first_over_later"] = round(figure["one_first_s"] / figure["one_later_s"], 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
