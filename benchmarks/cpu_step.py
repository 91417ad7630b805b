"""What a decode step costs on a CPU, with the compiled operators and with the references beside them.

    python benchmarks/cpu_step.py [--model DIR] [--requests N …] [--context TOKENS] [--long TOKENS] [--steps N]

A step is everything between a request's tokens: planning, the forward, drawing. Greedy, no drafts, on one thread, rows
of 1, 8 and 32 requests of `--context` tokens, in both fidelities; then a prompt of 512 tokens alone; then a step of one
request of `--long` tokens. Rounds take turns between the two arithmetics, and medians are compared. Without `--model`,
a random one of the size that ships.

Bounds: reading each weight that one row needs, at the speed at which this machine adds up memory; and the calls of a
step at the price of a call that computes nothing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from queue import SimpleQueue
from random import Random
from statistics import median
from typing import Any

import torch

from whalepod.core.clock import Deadline
from whalepod.core.ids import RequestId
from whalepod.engine.engine import Delivery, Engine
from whalepod.engine.interface import EngineRequest, Fidelity, TokensEvent
from whalepod.engine.options import RankOptions
from whalepod.engine.rank_model import RankModel
from whalepod.engine.sampling_params import SamplingParams
from whalepod.kernels.native import library
from whalepod.kernels.rms_norm import rms_norm
from whalepod.model.config import ModelConfig
from whalepod.model.network import Network
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint

SHIPPED: Mapping[str, Any] = {
    "hidden_size": 160,
    "num_hidden_layers": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4,
    "sliding_window": 64,
    "engram_layer_ids": [1, 3],
    "dspark_target_layer_ids": [5, 6, 7],
}
"""As the tiny model, but for these: the size of the model that ships."""
ARITHMETICS = {"operators": True, "reference": False}
PROMPT_TOKENS = 512
WARM_STEPS = 3
BANDWIDTH_BYTES = 1 << 28


@dataclass(slots=True)
class Running:
    """An engine whose requests are all in decode."""

    engine: Engine

    @classmethod
    def start(cls, model: RankModel, *, requests: int, tokens: int, steps: int, fidelity: Fidelity) -> Running:
        room = tokens + steps + WARM_STEPS + 2
        options = RankOptions(
            slots=requests,
            blocks=requests * -(-room // model.block_tokens) + 1,
            context_tokens_max=room,
            prefix_reuse=False,
            async_scheduling=False,
        )
        deliveries: SimpleQueue[Delivery] = SimpleQueue()
        engine = Engine(model, options, store=None, deliver=deliveries.put)
        for index in range(requests):
            engine.submit(_request(model, index, tokens=tokens, answer_tokens=room - tokens, fidelity=fidelity))
        started: set[RequestId] = set()
        while len(started) < requests:
            started |= {event.request_id for event in engine.step() if isinstance(event, TokensEvent)}
        for _ in range(WARM_STEPS):
            engine.step()
        return cls(engine)

    def step_ms(self, steps: int) -> list[float]:
        gc.collect()
        times: list[float] = []
        for _ in range(steps):
            started_s = time.perf_counter()
            self.engine.step()
            times.append((time.perf_counter() - started_s) * 1000)
        return times


def _request(model: RankModel, seed: int, *, tokens: int, answer_tokens: int, fidelity: Fidelity) -> EngineRequest:
    rng = Random(seed)
    return EngineRequest(
        request_id=RequestId(f"request {seed}".encode().ljust(16)),
        attempt=1,
        prompt_ids=tuple(rng.randrange(3, model.config.vocab_size) for _ in range(tokens)),
        sampling=SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True),
        fidelity=fidelity,
        deadline=Deadline.after(3600),
    )


def steps_of(
    model: RankModel, *, requests: int, tokens: int, fidelity: Fidelity, steps: int, rounds: int
) -> dict[str, float]:
    """Arithmetic -> median milliseconds of a step. Each has an engine of its own; they take turns."""
    names = [name for name in ARITHMETICS if library.available() or name == "reference"]
    running: dict[str, Running] = {}
    for name in names:
        with library.chosen(wanted=ARITHMETICS[name]):
            running[name] = Running.start(
                model, requests=requests, tokens=tokens, steps=steps * rounds, fidelity=fidelity
            )
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            with library.chosen(wanted=ARITHMETICS[name]):
                times[name] += running[name].step_ms(steps)
    for each in running.values():
        each.engine.close()
    return {name: median(values) for name, values in times.items()}


def prompt_ms(model: RankModel, *, fidelity: Fidelity, rounds: int) -> dict[str, float]:
    """Arithmetic -> median milliseconds from a prompt to its first token."""
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, wanted in ARITHMETICS.items():
            if wanted and not library.available():
                continue
            with library.chosen(wanted=wanted):
                started_s = time.perf_counter()
                Running.start(model, requests=1, tokens=PROMPT_TOKENS, steps=1, fidelity=fidelity).engine.close()
                times.setdefault(name, []).append((time.perf_counter() - started_s) * 1000)
    return {name: median(values) for name, values in times.items()}


def weights_bytes(config: ModelConfig, network: Network) -> int:
    """Of float32 weights that one row reads: everything but the experts it does not choose, and one row of `embed`."""
    seen: dict[int, int] = {}
    share = config.num_experts_per_tok / config.n_routed_experts

    def visit(part: object) -> None:
        if isinstance(part, torch.Tensor):
            routed = part.ndim == 3 and part.shape[0] == config.n_routed_experts
            seen[part.data_ptr()] = int(part.nbytes * (share if routed else 1))
        elif isinstance(part, list | tuple):
            for each in part:
                visit(each)
        elif is_dataclass(part) and not isinstance(part, ModelConfig):
            for field in fields(part):
                visit(getattr(part, field.name))

    visit([network.layers, network.head, network.norm])
    return sum(seen.values())


def bandwidth() -> float:
    """Bytes a second of adding up numbers that lie in memory, the best of five."""
    numbers = torch.ones(BANDWIDTH_BYTES // 4)
    return BANDWIDTH_BYTES / min(_seconds(numbers.sum) for _ in range(5))


def _seconds(work: Callable[[], object], times: int = 1) -> float:
    started_s = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started_s) / times


def calls_of(model: RankModel, *, tokens: int) -> tuple[int, int]:
    """Of a step of one request: calls of operators, and of functions and methods of torch beside them."""
    running = Running.start(model, requests=1, tokens=tokens, steps=4, fidelity=Fidelity.FAST)
    profile = cProfile.Profile()
    with profile:
        running.engine.step()
    running.engine.close()
    operators = others = 0
    entries: Mapping[tuple[str, int, str], tuple[int, ...]] = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    for (file, _, name), (calls, *_) in entries.items():
        operators += calls if file.endswith("native.py") and not name.startswith("_") else 0
        others += (
            calls if file == "~" and "torch" in name and "data_ptr" not in name and "contiguous" not in name else 0
        )
    return operators, others


def call_prices() -> tuple[float, float]:
    """Seconds of a call of an operator for no rows, and of a small call into torch."""
    nothing, weight, one = torch.ones(0, 64), torch.ones(64), torch.ones(1)
    with torch.inference_mode():
        return (
            min(_seconds(lambda: rms_norm(nothing, weight, eps=1e-6), 2000) for _ in range(5)),
            min(_seconds(lambda: one.add(1), 2000) for _ in range(5)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: writes a random one of the shipped size")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--long", type=int, default=8000)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        where: Path = asked.model or Path(directory) / "model"
        if asked.model is None:
            write_tiny_checkpoint(where, **SHIPPED)
        model = RankModel.load(where, threads=1)
    print(
        f"{_processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, one thread"
    )
    print("operators: " + (library.REASON_MISSING or f"compiled, numerics {library.NUMERICS}"))
    figures: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
    figures |= bounds(model, tokens=asked.context)
    runs: Sequence[tuple[str, Callable[[Fidelity], dict[str, float]]]] = [
        *(
            (
                f"step_{requests}",
                lambda fidelity, requests=requests: steps_of(
                    model,
                    requests=requests,
                    tokens=asked.context,
                    fidelity=fidelity,
                    steps=asked.steps,
                    rounds=asked.rounds,
                ),
            )
            for requests in asked.requests
        ),
        (f"prompt_{PROMPT_TOKENS}", lambda fidelity: prompt_ms(model, fidelity=fidelity, rounds=asked.rounds)),
        (
            f"step_1_at_{asked.long}",
            lambda fidelity: steps_of(
                model, requests=1, tokens=asked.long, fidelity=fidelity, steps=asked.steps, rounds=asked.rounds
            ),
        ),
    ]
    for name, run in runs:
        for fidelity in Fidelity:
            times = run(fidelity)
            shown = ", ".join(f"{arithmetic} {ms:7.2f} ms" for arithmetic, ms in times.items())
            print(f"{name:15} {fidelity.value:6} {shown}", flush=True)
            figures |= {f"{name}_{fidelity.value}_{arithmetic}_ms": round(ms, 3) for arithmetic, ms in times.items()}
    print(json.dumps(figures))


def bounds(model: RankModel, *, tokens: int) -> dict[str, float]:
    needed, speed = weights_bytes(model.config, model.network), bandwidth()
    (operators, others), (operator_s, other_s) = calls_of(model, tokens=tokens), call_prices()
    floor_ms = (operators * operator_s + others * other_s) * 1000
    print(
        f"a row reads {needed / 1e6:.1f} MB of weights; at {speed / 1e9:.1f} GB/s that is {needed / speed * 1e3:.2f} ms"
    )
    print(
        f"a step of one request is {operators} calls of operators ({operator_s * 1e6:.2f} µs for no rows) and {others} "
        f"others of torch ({other_s * 1e6:.2f} µs): {floor_ms:.2f} ms without computing anything"
    )
    return {
        "weights_mb": round(needed / 1e6, 2),
        "bandwidth_gb_s": round(speed / 1e9, 2),
        "bound_ms": round(needed / speed * 1e3, 3),
        "operator_calls": operators,
        "torch_calls": others,
        "call_floor_ms": round(floor_ms, 3),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


if __name__ == "__main__":
    main()
