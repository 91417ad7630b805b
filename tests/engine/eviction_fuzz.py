"""Requests over two ranks whose store loses values at any moment; what each says is what a rank without a store says.

    python -m tests.engine.eviction_fuzz [--rounds N] [--seed N]

Everything is real (scheduler, pools, restoring, publishing, transfers, store client, value format) but the store, which
evicts by a seed, and the network, which is of hashes (`hash_network.py`) or the tiny one. One round is one request in
`exact`, on one rank or handed over from one to the other. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from random import Random

from tests.engine import engine_world
from tests.engine.engine_world import GREEDY, OPTIONS, SEEDED, Heard, World, decode, prefill, prompt_of, tiny_model
from tests.engine.hash_network import HashNetwork
from whalepod.core.ids import Incarnation
from whalepod.engine.interface import Fidelity, SampledToken
from whalepod.engine.runner import Runner, StepRunner
from whalepod.engine.sampling_params import SamplingParams
from whalepod.kvstore.client import KvClient
from whalepod.kvstore.faulty_transport import Fault, FaultSchedule, FaultyTransport, VirtualClock
from whalepod.kvstore.settings import StoreSettings

FEW_BLOCKS = replace(OPTIONS, blocks=12)
"""The device soon forgets: what is hit comes from the store."""
SEEDS = 2
"""Prompts of one length: few, so that they are met again."""
RATES = (0.05, 0.2, 0.5)
"""A value is lost at so many of the store's steps; drawn for every world."""
ROUNDS_A_WORLD = 100

Instrument = Callable[[StepRunner], StepRunner]
Oracle = Callable[[int, SamplingParams, int], tuple[SampledToken, ...]]


class Lossy:
    """Two ranks that share a store, which loses a value at many of its steps."""

    def __init__(self, seed: int, *, rate: float = 0.3, instrument: Instrument | None = None) -> None:
        clock = VirtualClock()
        self.transport = FaultyTransport(FaultSchedule(seed=seed, rates={Fault.EVICT: rate}), clock)
        model = tiny_model()
        self.client = KvClient(
            StoreSettings(missing_life_s=0.0),
            namespace=model.namespace,
            layout=model.block_layout,
            incarnation=Incarnation(1),
            clock=clock,
            transport=self.transport,
        )
        self.ranks = [World(store=self.client, options=FEW_BLOCKS, instrument=instrument) for _ in range(2)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.engine.close()
        self.client.close()


def play(lossy: Lossy, draw: Random, lengths: Sequence[int], oracle: Oracle) -> tuple[bool, int]:
    """One round: whether it said what it should, and the tokens that it had hit."""
    tokens, seed, sampling = draw.choice(lengths), draw.randrange(SEEDS), draw.choice((GREEDY, SEEDED))
    prompt, first = prompt_of(tokens, seed=seed), draw.choice(lossy.ranks)
    heard: Heard
    if draw.random() < 0.5:
        heard = first.generate(prompt, sampling, fidelity=Fidelity.EXACT)
    else:
        name = f"r{draw.getrandbits(40):x}"
        handoff = prefill(first, prompt, sampling, name=name)
        other = next(rank for rank in lossy.ranks if rank is not first)
        heard = decode(other, prompt, handoff, sampling, name=name)
    return tuple(heard.tokens) == oracle(tokens, sampling, seed), heard.end.cached_tokens


def tiny_oracle(tokens: int, sampling: SamplingParams, seed: int) -> tuple[SampledToken, ...]:
    return engine_world.oracle(tokens, sampling, seed=seed)


def of_hashes(runner: StepRunner) -> StepRunner:
    assert isinstance(runner, Runner)
    return HashNetwork(runner._caches, tiny_model().config)


@cache
def hash_oracle(tokens: int, sampling: SamplingParams, seed: int) -> tuple[SampledToken, ...]:
    """What one cold rank says, alone and in one chunk, with the network of hashes."""
    world = World(options=replace(OPTIONS, slots=1, chunk_tokens=512), instrument=of_hashes)
    said = tuple(world.generate(prompt_of(tokens, seed=seed), sampling, shares=False).tokens)
    world.engine.close()
    return said


def fuzz(rounds: int, *, seed: int) -> Counter[str]:
    """Figures of so many rounds with the network of hashes: `rounds`, `wrong`, `hit`, `missed`, `lost` values."""
    draw, figures = Random(seed), Counter[str]()
    lengths = range(1, 151)
    while figures["rounds"] < rounds:
        rate = draw.choice(RATES)
        lossy = Lossy(draw.getrandbits(32), rate=rate, instrument=of_hashes)
        few = draw.sample(lengths, 6)
        for _ in range(min(ROUNDS_A_WORLD, rounds - figures["rounds"])):
            right, hit = play(lossy, draw, few, hash_oracle)
            figures.update(rounds=1, wrong=int(not right), hit=int(hit > 0), missed=int(hit == 0))
        figures["lost"] += lossy.transport.evicted
        lossy.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures = fuzz(options.rounds, seed=options.seed)
    sys.stdout.write(json.dumps(dict(figures)) + "\n")
    sys.exit(figures["wrong"] > 0)


if __name__ == "__main__":
    main()
