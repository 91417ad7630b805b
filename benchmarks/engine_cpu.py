"""What batching gives on a CPU, and what a step costs the host.

    python benchmarks/engine_cpu.py [--model DIR] [--threads N] [--rounds N]

Tokens a second of the engine at 1, 8 and 32 requests (`fast`, one step ahead), beside a plain loop over the same model
in the same run: one request after another, each forward called directly, the best token taken. All tokens are greedy,
and prompts count. Rounds take turns, medians are compared.

Then the host's part of a step of 256 requests: planning, launching and committing, without forward, drafting and
drawing, which a stand-in and another thread do. Every request has penalties and log-probabilities and verifies 5
drafts, of which the stand-in lets 3 stand. It is the processor time of the engine's thread.

The last line is one JSON object: `speedup_32` (engine over plain loop), `gain_32` (32 requests over 1),
`schedule_ms_256` and what they are made of.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from statistics import median
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.core.clock import SYSTEM_CLOCK, Deadline, thread_cpu_s
from whalepod.core.ids import RequestId
from whalepod.engine.device import LaunchedRows
from whalepod.engine.engine import Delivery, Engine
from whalepod.engine.interface import EngineRequest, Fidelity, TokensEvent
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.kernels.numerics import whole_batches
from whalepod.model.batch import Segment
from whalepod.model.draft import Anchor, Chooser, Drafts
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 64
ANSWER_TOKENS = 32
PLAIN_REQUESTS = 3

HOST_REQUESTS = 256
HOST_STEPS = 30
WARM_STEPS = 4
DRAFTS, DRAFTS_THAT_STAND = 5, 3

Figures: TypeAlias = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: writes a tiny one")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        where: Path = asked.model or Path(directory) / "model"
        if asked.model is None:
            write_tiny_checkpoint(where)
        model = RankModel.load(where, threads=asked.threads)
    processor = platform.processor() or platform.machine()
    print(f"{processor}, {os.cpu_count()} cores, torch {torch.__version__} on {asked.threads} threads")
    figures = batching(model, rounds=asked.rounds) | host_time(model)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def batching(model: RankModel, *, rounds: int) -> Figures:
    """Tokens a second of each way."""
    prompts = [_prompt(model, seed) for seed in range(max(BATCHES))]
    rates: dict[str, list[float]] = {"plain": [], **{str(batch): [] for batch in BATCHES}}
    for _ in range(rounds):
        rates["plain"].append(_rate(lambda: sum(plain_loop(model, prompt) for prompt in prompts[:PLAIN_REQUESTS])))
        for batch in BATCHES:
            rates[str(batch)].append(_rate(lambda batch=batch: engine_tokens(model, prompts[:batch])))
    medians = {name: median(values) for name, values in rates.items()}
    print(f"plain loop    {medians['plain']:8.1f} tokens/s")
    for batch in BATCHES:
        rate = medians[str(batch)]
        ratios = f"{rate / medians['plain']:5.2f} × plain loop, {rate / medians['1']:5.2f} × one request"
        print(f"{batch:3} requests  {rate:8.1f} tokens/s  {ratios} (bound: {batch}, if a row more cost nothing)")
    print("the same, by round: " + "; ".join(f"{name} {_listed(values)}" for name, values in rates.items()))
    return {
        "tokens_s_plain": medians["plain"],
        **{f"tokens_s_{batch}": medians[str(batch)] for batch in BATCHES},
        **{f"speedup_{batch}": medians[str(batch)] / medians["plain"] for batch in BATCHES},
        "gain_32": medians["32"] / medians["1"],
    }


def _rate(work: Callable[[], int]) -> float:
    started_s = SYSTEM_CLOCK.monotonic_s()
    tokens = work()
    return tokens / (SYSTEM_CLOCK.monotonic_s() - started_s)


@torch.inference_mode()
def plain_loop(model: RankModel, prompt: Sequence[int]) -> int:
    """One request by forwards of one sequence. How many tokens it got."""
    network, config = model.network, model.config
    blocks = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // model.block_tokens)
    caches = model.allocate(blocks=blocks, slots=1)
    tokens, start = list(prompt), 0
    look_back = config.engram_max_ngram_size - 1
    with whole_batches():
        for _ in range(ANSWER_TOKENS):
            segment = Segment(
                slot=0,
                block_table=range(blocks),
                start=start,
                token_ids=tokens[start:],
                history=tokens[max(0, start - look_back) : start],
                floor=config.floor(PROMPT_TOKENS),
                logits_start=len(tokens) - 1,
            )
            logits = network.forward([segment], caches)
            start = len(tokens)
            tokens.append(int(logits[0].argmax()))
    return ANSWER_TOKENS


def engine_tokens(model: RankModel, prompts: Sequence[Sequence[int]]) -> int:
    """All requests at once. How many tokens they got together."""
    context = PROMPT_TOKENS + ANSWER_TOKENS
    options = RankOptions(
        slots=len(prompts),
        blocks=len(prompts) * -(-context // model.block_tokens) + 1,
        context_tokens_max=context,
        prefix_reuse=False,
    )
    deliveries: SimpleQueue[Delivery] = SimpleQueue()
    engine = Engine(model, options, store=None, deliver=deliveries.put)
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.submit(_request(index, prompt, sampling))
    tokens = 0
    while engine.runnable:
        tokens += sum(len(event.tokens) for event in engine.step() if isinstance(event, TokensEvent))
    engine.close()
    assert tokens == len(prompts) * ANSWER_TOKENS
    return tokens


@dataclass(frozen=True, slots=True)
class StandIn:
    """Says what follows a row by its position alone, and drafts the same, except behind the drafts that shall stand."""

    table: NDArray[np.float32]
    """[positions, vocab]"""

    def run(self, rows: Sequence[LaunchedRows]) -> list[NDArray[np.float32] | None]:
        starts = [row.segment.logits_start for row in rows]
        return [
            None if start is None else self._after(np.arange(start, row.segment.end))
            for start, row in zip(starts, rows, strict=True)
        ]

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        positions = np.array([anchor.position for anchor in anchors])
        ids: list[Tensor] = []
        for number in range(tokens):
            off = 0 if number < DRAFTS_THAT_STAND else len(self.table) // 2
            ids.append(choose(number, torch.from_numpy(self._after(positions + number + off))))
        drafted = torch.stack(ids, dim=1)
        return Drafts(drafted, torch.zeros(*drafted.shape, 0), None)

    def _after(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.table[positions % len(self.table)]


def host_time(model: RankModel) -> Figures:
    """Milliseconds that the engine's thread needs for a step."""
    answer_tokens = (DRAFTS + 1) * (HOST_STEPS + 2 * WARM_STEPS)
    context = PROMPT_TOKENS + answer_tokens
    options = RankOptions(
        slots=HOST_REQUESTS,
        blocks=HOST_REQUESTS * -(-context // model.block_tokens) + 1,
        chunk_tokens=HOST_REQUESTS * PROMPT_TOKENS,
        waiting_max=HOST_REQUESTS,
        context_tokens_max=context,
        speculation=SpeculationOptions(draft_tokens=DRAFTS),
    )
    table = np.random.default_rng(0).normal(size=(64, model.config.vocab_size)).astype(np.float32)
    deliveries: SimpleQueue[Delivery] = SimpleQueue()
    engine = Engine(model, options, store=None, deliver=deliveries.put, instrument=lambda _: StandIn(table))
    sampling = SamplingParams(
        temperature=0,
        max_tokens=answer_tokens,
        ignore_eos=True,
        logprobs=5,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
    )
    for index in range(HOST_REQUESTS):
        engine.submit(_request(index, _prompt(model, index), sampling))
    for _ in range(WARM_STEPS):
        engine.step()
    engine.take_works()
    gc.collect()
    gc.freeze()  # As a rank does when it has started.
    times_ms: list[float] = []
    tokens = 0
    for _ in range(HOST_STEPS):
        started_s = thread_cpu_s()
        events = engine.step()
        times_ms.append((thread_cpu_s() - started_s) * 1000)
        tokens += sum(len(event.tokens) for event in events if isinstance(event, TokensEvent))
        del events  # Letting go of answers is the work of who takes them, not of the next step.
    works = engine.take_works()
    engine.close()
    gc.unfreeze()
    assert all(work.decode_rows == HOST_REQUESTS * (1 + DRAFTS) for work in works), "a step was not full"
    device_ms = median(work.seconds for work in works) * 1000
    said = tokens / HOST_STEPS / HOST_REQUESTS
    rows = HOST_REQUESTS * (1 + DRAFTS)
    print(f"{HOST_REQUESTS} requests, {rows} rows, {said:.2f} tokens of each a step:")
    print(f"  host    {median(times_ms):6.2f} ms, bound 2 ms ({min(times_ms):.2f} to {max(times_ms):.2f})")
    print(f"  device  {device_ms:6.1f} ms of drafting and drawing beside it")
    return {
        "schedule_ms_256": median(times_ms),
        "schedule_tokens": said,
        "draw_ms_256": device_ms,
    }


def _request(index: int, prompt: Sequence[int], sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(f"request {index}".encode().ljust(16)),
        attempt=1,
        prompt_ids=prompt,
        sampling=sampling,
        fidelity=Fidelity.FAST,
        deadline=Deadline.after(3600),
    )


def _prompt(model: RankModel, seed: int) -> tuple[int, ...]:
    rng = Random(seed)
    return tuple(rng.randrange(3, model.config.vocab_size) for _ in range(PROMPT_TOKENS))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


if __name__ == "__main__":
    main()
