"""Experts over 64 ranks: are the results those of one rank, and how well is the load spread?

    python benchmarks/ep64.py [--tokens N] [--model DIR]

64 logical ranks in this process (the dispatch of real ranks, bytes that stay in memory) each run a prompt of their own
and generate greedily, on a tiny model with 384 experts a layer and 64 redundant slots; in mid-run the experts move to
where EPLB wants them. Every row's logits are compared bit by bit with those of one rank that holds all experts.

Utilisation is the mean over the maximum of the ranks' loads, under a permuted Zipf(1) load; published for this
algorithm: 0.10 without redundant slots, 0.98 with 64. The last line is one JSON object: `different`, `utilisation_384`,
`utilisation_448`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.engine.expert_parallel.balancing import balance_global, utilisation
from whalepod.engine.expert_parallel.group import ExpertGroup, Job
from whalepod.engine.expert_parallel.memory_group import MemoryGroup
from whalepod.engine.expert_parallel.placement import even_placement
from whalepod.engine.expert_parallel.rebalancing import RebalanceOptions
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.checkpoint import load_engram_tables, load_tensors
from whalepod.model.config import ModelConfig
from whalepod.model.draft import Anchor
from whalepod.model.engram_token_map import engram_token_map
from whalepod.model.network import Network
from whalepod.model.record_formats import RELEASE_FORMATS
from whalepod.model.tiny_checkpoint import write_tiny_checkpoint
from whalepod.model.tokenizer import Tokenizer

RANKS = 64
EXPERTS = 384
REDUNDANT = 64
PUBLISHED = {"utilisation_384": 0.10, "utilisation_448": 0.98}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=12, help="that each rank generates")
    parser.add_argument("--model", type=Path, help="a checkpoint with 384 experts; default: writes a tiny one")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    figures = zipf_utilisation()
    for name, value in figures.items():
        print(f"{name}: {value:.3f}, published {PUBLISHED[name]:.2f}, ratio {value / PUBLISHED[name]:.3f}")
    with tempfile.TemporaryDirectory() as directory:
        model = asked.model or Path(directory) / "model"
        if asked.model is None:
            write_tiny_checkpoint(model, n_routed_experts=EXPERTS)
        different = compare(model, tokens=asked.tokens)
    print(json.dumps({"different": different} | {name: round(value, 4) for name, value in figures.items()}))


def zipf_utilisation() -> dict[str, float]:
    loads = [1.0 / (rank + 1) for rank in range(EXPERTS)]
    random.Random(0).shuffle(loads)
    print(f"experts in order, no redundant slots: {utilisation(even_placement(EXPERTS, RANKS), loads):.3f}")
    return {
        f"utilisation_{slots}": utilisation(balance_global(loads, slots=slots, ranks=RANKS), loads)
        for slots in (EXPERTS, EXPERTS + REDUNDANT)
    }


@dataclass
class Generation:
    """One sequence on caches of its own."""

    network: Network
    tokens: list[int]
    caches: Caches
    logits: list[Tensor] = field(default_factory=list)
    drafted: Tensor | None = None
    computed: int = 0

    @classmethod
    def begin(cls, network: Network, prompt: Sequence[int], *, tokens: int) -> Generation:
        blocks = -(-(len(prompt) + tokens) // network.config.block_tokens)
        return cls(
            network, list(prompt), Caches.allocate(network.config, blocks=blocks, slots=1, formats=RELEASE_FORMATS)
        )

    def step(self) -> None:
        """Compute all rows that are there, and draw the next token."""
        look_back = self.network.config.engram_max_ngram_size - 1
        segment = Segment(
            slot=0,
            block_table=range(next(iter(self.caches.global_kv.values())).shape[0]),
            start=self.computed,
            token_ids=self.tokens[self.computed :],
            history=self.tokens[max(0, self.computed - look_back) : self.computed],
            logits_start=self.computed,
        )
        logits = self.network.forward([segment], self.caches)
        self.computed = len(self.tokens)
        self.logits.append(logits)
        self.tokens.append(int(logits[-1].argmax()))

    def draft(self) -> None:
        assert self.network.drafter is not None
        anchor = Anchor(slot=0, position=self.computed, token_id=self.tokens[-1])
        self.drafted = self.network.drafter.draft([anchor], self.caches).logits

    def differences(self, other: Generation) -> int:
        """Rows whose logits have other bits, and tokens that differ."""
        assert self.drafted is not None
        assert other.drafted is not None
        ours, theirs = (torch.cat([*each.logits, each.drafted[0]]) for each in (self, other))  # pyright: ignore[reportOptionalSubscript]
        rows = (ours.view(torch.int32) != theirs.view(torch.int32)).any(dim=1)
        return int(rows.sum()) + sum(a != b for a, b in zip(self.tokens, other.tokens, strict=True))


def compare(model: Path, *, tokens: int) -> int:
    config = ModelConfig.from_dir(model)
    tensors = load_tensors(model, config, dtype=torch.float32)
    tables = load_engram_tables(model, config, dtype=torch.float32)
    token_map = engram_token_map(Tokenizer.from_dir(model), config)
    prompts = [
        [random.Random(rank).randrange(3, config.vocab_size) for _ in range(9 + 7 * rank % 41)] for rank in range(RANKS)
    ]
    alone = Network(config, tensors, engram_tables=tables, token_map=token_map)
    wanted = [Generation.begin(alone, prompt, tokens=tokens) for prompt in prompts]
    for each in wanted:
        for _ in range(tokens):
            each.step()
        each.draft()
    group = MemoryGroup(
        config,
        tensors,
        ranks=RANKS,
        redundant=REDUNDANT,
        engram_tables=tables,
        token_map=token_map,
        rebalancing=RebalanceOptions(interval_steps=0, gain_min=0.0),
        timeout_s=300.0,
    )
    got = [
        Generation.begin(network, prompt, tokens=tokens)
        for network, prompt in zip(group.networks, prompts, strict=True)
    ]
    started_s = SYSTEM_CLOCK.monotonic_s()
    for number in range(tokens):
        if number == tokens // 3:
            group.look_at_loads()  # the rebalance in mid-run: layers move while the steps after this one go on
        # A few ranks have nothing to do in some steps, and fall behind.
        group.round([_job(each, number) for each in got])
    while any(len(each.logits) < tokens for each in got):
        group.round([None if len(each.logits) == tokens else _job(each, -1) for each in got])
    group.round([Job(rows=config.dspark_block_size, call=each.draft, draft=True) for each in got])
    _describe(group.groups[0], group, SYSTEM_CLOCK.monotonic_s() - started_s)
    group.close()
    return sum(ours.differences(theirs) for ours, theirs in zip(got, wanted, strict=True))


def _job(each: Generation, number: int) -> Job | None:
    rows = len(each.tokens) - each.computed
    if number >= 0 and (len(each.tokens) + number) % 5 == 0:
        return None
    return Job(rows=rows, call=each.step, prompts=rows > 1)


def _describe(first: ExpertGroup, group: MemoryGroup, seconds: float) -> None:
    rebalancer = group.rebalancers[0]
    even = even_placement(EXPERTS, RANKS, redundant=REDUNDANT)
    moved = sum(placement.experts == EXPERTS and placement != even for placement in first.placements)
    print(
        f"{RANKS} ranks, {EXPERTS} experts, {REDUNDANT} redundant slots: {first.statistics.rounds} rounds in "
        f"{seconds:.1f} s, {first.statistics.dummy_passes} dummy passes of rank 0, {moved} layers moved in "
        f"{rebalancer.rebalances} rebalance, balancedness before it {rebalancer.balancedness:.3f}"
    )


if __name__ == "__main__":
    main()
