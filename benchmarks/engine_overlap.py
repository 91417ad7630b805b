"""How long the device waits for the host between steps, with asynchronous scheduling and without.

    python benchmarks/engine_overlap.py [--requests N] [--steps N] [--step-ms MS]

The device is timed: instead of the network it sleeps for the time of a step, then draws the tokens as ever. Everything
else is the engine that serves. Idle is the share of the time in which the device did neither. The last line is one JSON
object: `idle_async`, `idle_sync`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import RequestId
from whalepod.engine.device import LaunchedRows
from whalepod.engine.engine import Delivery, Engine
from whalepod.engine.interface import EngineRequest, Fidelity
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.draft import Anchor, Chooser, Drafts
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

PROMPT_TOKENS = 32
WARM_STEPS = 10


class TimedRunner:
    """Takes the time of a step and says the same after every row."""

    def __init__(self, *, seconds: float, vocab_size: int) -> None:
        self._seconds = seconds
        self._logits = np.linspace(0, 1, vocab_size, dtype=np.float32)[None, :]

    def run(self, rows: Sequence[LaunchedRows]) -> list[NDArray[np.float32] | None]:
        threading.Event().wait(self._seconds)
        return [self._logits if row.draws else None for row in rows]

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:  # noqa: ARG002
        raise AssertionError("nothing is drafted here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=32, help="that decode at a time")
    parser.add_argument("--steps", type=int, default=200, help="that are measured")
    parser.add_argument("--step-ms", type=float, default=5.0, help="what the device takes for a step")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(Path(directory) / "model")
        model = RankModel.load(Path(directory) / "model")
    idle = {
        name: idle_share(model, ahead=ahead, requests=asked.requests, steps=asked.steps, step_s=asked.step_ms / 1000)
        for name, ahead in (("idle_sync", False), ("idle_async", True))
    }
    for name, share in idle.items():
        print(f"{name}: {share:.1%} of the time")
    print(json.dumps({name: round(share, 4) for name, share in idle.items()}))


def idle_share(model: RankModel, *, ahead: bool, requests: int, steps: int, step_s: float) -> float:
    """Of a steady state in which every request decodes."""
    answer_tokens = steps + 3 * WARM_STEPS
    context = PROMPT_TOKENS + answer_tokens
    options = RankOptions(
        slots=requests,
        blocks=requests * -(-context // model.block_tokens) + 2,
        chunk_tokens=requests * PROMPT_TOKENS,
        context_tokens_max=context,
        async_scheduling=ahead,
    )
    deliveries: SimpleQueue[Delivery] = SimpleQueue()
    runner = TimedRunner(seconds=step_s, vocab_size=model.config.vocab_size)
    engine = Engine(model, options, store=None, deliver=deliveries.put, instrument=lambda _: runner)
    for index in range(requests):
        engine.submit(_request(index, answer_tokens))
    for _ in range(WARM_STEPS):
        engine.step()
    engine.take_works()
    started_s = SYSTEM_CLOCK.monotonic_s()
    for _ in range(steps):
        engine.step()
    elapsed_s = SYSTEM_CLOCK.monotonic_s() - started_s
    works = engine.take_works()
    assert len(works) == steps
    assert all(work.decode_rows == requests for work in works)
    engine.close()
    return 1 - sum(work.seconds for work in works) / elapsed_s


def _request(index: int, answer_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(f"request {index}".encode().ljust(16)),
        attempt=1,
        prompt_ids=tuple(range(3, 3 + PROMPT_TOKENS)),
        sampling=SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True),
        fidelity=Fidelity.FAST,
        deadline=Deadline.after(3600),
    )


if __name__ == "__main__":
    main()
