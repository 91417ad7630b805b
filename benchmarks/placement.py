"""How well requests are placed: hits against what the store could give, balance, and goodput against other ways.

    python benchmarks/placement.py [--requests N] [--skip N] [--trace conversation|synthetic] [--seed S]

A public trace is replayed on timed ranks and virtual time (`placement_cases/`): 4 prefill and 4 decode ranks that share
a store which keeps everything. The router's own code places, fed by loads that ride on replies. First the load is found
at which a cost function in the manner of Dynamo's (overlap credit and load) still holds the service level for 90 % of
the requests; all ways are then run at that load. Level: the first token within 1 s and three times what the prompt
takes on an idle rank, then 40 ms between tokens. Goodput is requests a second that keep it: at that load, 1.11 times is
all there is. The other bounds: hits of a store that computes no block twice, a load of 1.0 times the mean. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from placement_cases.contenders import Contender, CostFunction, Placed, Ranks, Router
from placement_cases.timed_ranks import BLOCK_TOKENS, DecodeRank, PrefillRank, Speeds, Store
from placement_cases.virtual_time import VirtualClock, VirtualLoop, run_virtually

from whalepod.core.block_keys import BlockHash
from whalepod.core.clock import Clock
from whalepod.services.router.placement import Policy

RANKS = 4
SLOTS = 48
SPEEDS = Speeds()
FIRST_TOKEN_S = 1.0
FIRST_TOKEN_FACTOR = 3.0
TOKEN_S = 0.040


@dataclass(frozen=True, slots=True)
class Traced:
    at_s: float
    tokens: int
    output_tokens: int
    chain: tuple[BlockHash, ...]


@dataclass(slots=True)
class Served:
    tokens: int
    hit_tokens: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0

    @property
    def good(self) -> bool:
        limit_s = FIRST_TOKEN_S + FIRST_TOKEN_FACTOR * self.tokens * SPEEDS.prompt_row_s
        return self.first_token_s <= limit_s and self.token_s <= TOKEN_S


@dataclass(frozen=True, slots=True)
class Result:
    good_share: float
    goodput: float
    hit_of_ideal: float
    load_max_over_mean: float
    ranks_idle: int
    first_token_s_mean: float


Make = Callable[[Ranks, Clock], Contender]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--skip", type=int, default=0, help="requests at the trace's beginning that are left out")
    parser.add_argument("--trace", choices=("conversation", "synthetic"), default="conversation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    trace = load(options.trace)[options.skip : options.skip + options.requests]
    tokens = sum(one.tokens for one in trace)
    print(
        f"machine: {platform.machine()}, {os.cpu_count()} cores; virtual time, {RANKS} prefill and {RANKS} decode ranks"
    )
    print(f"trace: {options.trace}, {len(trace)} requests, {tokens / len(trace):.0f} tokens each")

    def cost_function(ranks: Ranks, clock: Clock) -> Contender:
        del clock
        return CostFunction(ranks, seed=options.seed)

    def routed(policy: Policy) -> Make:
        return lambda ranks, clock: Router(ranks, policy, clock=clock, seed=options.seed)

    speedup = highest_load(trace, cost_function)
    rate = len(trace) / (trace[-1].at_s - trace[0].at_s) * speedup
    print(f"load: {rate:.2f} requests/s, at which the cost function holds the level for 90 %")
    results = {"cost function": replay(trace, speedup, cost_function)}
    results |= {policy.value: replay(trace, speedup, routed(policy)) for policy in Policy}
    print(f"{'':>14} {'good':>6} {'goodput':>8} {'hit/ideal':>9} {'max/mean':>8} {'idle':>4} {'ttft':>7}")
    for name, one in results.items():
        print(
            f"{name:>14} {one.good_share:6.1%} {one.goodput:6.2f}/s {one.hit_of_ideal:9.3f} "
            f"{one.load_max_over_mean:8.2f} {one.ranks_idle:4d} {one.first_token_s_mean:6.2f}s"
        )
    ours, theirs = results[Policy.KV.value], results["cost function"]
    figures = {
        "hit_of_ideal": round(ours.hit_of_ideal, 4),
        "load_max_over_mean": round(ours.load_max_over_mean, 3),
        "goodput_over_cost_function": round(ours.goodput / theirs.goodput, 3),
        "ranks_idle": ours.ranks_idle,
        "requests_per_s": round(rate, 3),
    }
    print(json.dumps(figures))


def load(name: str) -> list[Traced]:
    path = Path(__file__).parent / "traces" / f"mooncake_fast25_{name}.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        Traced(
            row["timestamp"] / 1000,
            row["input_length"],
            max(1, row["output_length"]),
            tuple(BlockHash(b"%d" % block) for block in row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]),
        )
        for row in rows
    ]


def ideal_hit_tokens(trace: Sequence[Traced]) -> int:
    """If every block were computed once, and were there the moment it was first asked for."""
    seen: set[BlockHash] = set()
    hit = 0
    for one in trace:
        leading = next((index for index, block in enumerate(one.chain) if block not in seen), len(one.chain))
        hit += min(leading * BLOCK_TOKENS, one.tokens - 1)
        seen.update(one.chain)
    return hit


def highest_load(trace: Sequence[Traced], make: Make) -> float:
    """How much faster than it was recorded the trace may come for 90 % to be good, to 0.3 %."""
    low, high = 0.1, 0.2
    while replay(trace, high, make).good_share >= 0.9:
        low, high = high, 2 * high
    while high / low > 1.003:
        middle = (low * high) ** 0.5
        if replay(trace, middle, make).good_share >= 0.9:
            low = middle
        else:
            high = middle
    return low


def replay(trace: Sequence[Traced], speedup: float, make: Make) -> Result:
    loop = VirtualLoop()
    served = [Served(one.tokens) for one in trace]
    pools: list[Ranks] = []

    clock = VirtualClock(loop)

    async def run() -> None:
        store = Store()
        ranks = Ranks(
            store,
            {f"prefill-{index}": PrefillRank(store, SPEEDS) for index in range(RANKS)},
            {f"decode-{index}": DecodeRank(store, SPEEDS, slots=SLOTS, clock=clock) for index in range(RANKS)},
        )
        pools.append(ranks)
        contender = make(ranks, clock)
        tasks: list[asyncio.Task[None]] = []
        for number, one in enumerate(trace):
            await asyncio.sleep(max(0.0, (one.at_s - trace[0].at_s) / speedup - clock.monotonic_s()))
            tasks.append(asyncio.create_task(serve(number, one, contender, ranks, served[number], clock)))
        await asyncio.gather(*tasks)

    run_virtually(loop, run())
    return _result(trace, served, pools[0], speedup)


async def serve(
    number: int, one: Traced, contender: Contender, ranks: Ranks, served: Served, clock: VirtualClock
) -> None:
    arrived_s = clock.monotonic_s()
    placed: Placed = await contender.place(number, one.chain, one.tokens, one.output_tokens)
    decode = ranks.decode[placed.decode]
    decode.requests += 1
    decode.served += 1
    try:
        if placed.prefill is not None:
            served.hit_tokens = await ranks.prefill[placed.prefill].run(one.chain, one.tokens)
            placed.ready()
            await asyncio.sleep(SPEEDS.handoff_s + one.tokens * SPEEDS.fetch_token_s)
        else:
            served.hit_tokens = await decode.compute(one.chain, one.tokens)
        await decode.generate(1)
        served.first_token_s = clock.monotonic_s() - arrived_s
        placed.first_token()
        began_s = clock.monotonic_s()
        if one.output_tokens > 1:
            await decode.generate(one.output_tokens - 1)
            served.token_s = (clock.monotonic_s() - began_s) / (one.output_tokens - 1)
    finally:
        decode.requests -= 1
        placed.end()


def _result(trace: Sequence[Traced], served: Sequence[Served], ranks: Ranks, speedup: float) -> Result:
    good = sum(one.good for one in served)
    seconds = (trace[-1].at_s - trace[0].at_s) / speedup
    pools = [list(ranks.prefill.values()), list(ranks.decode.values())]
    balance = [max(rank.busy_s for rank in pool) * len(pool) / sum(rank.busy_s for rank in pool) for pool in pools]
    return Result(
        good_share=good / len(trace),
        goodput=good / seconds,
        hit_of_ideal=sum(one.hit_tokens for one in served) / ideal_hit_tokens(trace),
        load_max_over_mean=max(balance),
        ranks_idle=sum(rank.served == 0 for pool in pools for rank in pool),
        first_token_s_mean=sum(one.first_token_s for one in served) / len(trace),
    )


if __name__ == "__main__":
    main()
