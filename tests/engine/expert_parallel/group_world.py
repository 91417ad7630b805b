"""Groups of logical ranks over random weights, each rank with a prompt of its own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tests.model.network_world import Sequences, Weights, golden_config, random_prompt
from whalepod.engine.expert_parallel.group import GroupOptions, Job
from whalepod.engine.expert_parallel.memory_group import MemoryGroup
from whalepod.engine.expert_parallel.rebalancing import RebalanceOptions
from whalepod.model.checkpoint import EngramTable

CONFIG = golden_config(n_routed_experts=16, num_experts_per_tok=3)
WEIGHTS = Weights.draw(CONFIG)


def memory_group(ranks: int, *, redundant: int = 0, weights: Weights = WEIGHTS, **options: int) -> MemoryGroup:
    return MemoryGroup(
        weights.config,
        weights.tensors,
        ranks=ranks,
        redundant=redundant,
        engram_tables={
            layer: EngramTable(weights.tensors[f"layers.{layer}.engram.embed.weight"], None, torch.float32)
            for layer in weights.config.engram_layer_ids
        },
        token_map=weights.token_map,
        options=GroupOptions(**options),
        rebalancing=RebalanceOptions(interval_steps=0, gain_min=0.0),
    )


def prompt_of(rank: int) -> list[int]:
    """Of another length for each rank."""
    return random_prompt(21 + 3 * (rank % 7), seed=rank, below=WEIGHTS.config.vocab_size)


class RankSequences:
    """One sequence a rank, stepped together."""

    def __init__(self, group: MemoryGroup, ranks: Mapping[int, int] | None = None) -> None:
        """`ranks`: which have a sequence (all), and its seed."""
        self.group = group
        seeds = ranks if ranks is not None else {rank: rank for rank in range(len(group.networks))}
        self.sequences = {rank: Sequences(group.networks[rank], [prompt_of(seed)]) for rank, seed in seeds.items()}

    def step(self, rows: Mapping[int, int]) -> None:
        """One round: so many more rows on these ranks, none on the others."""
        jobs: list[Job | None] = [None] * len(self.group.networks)
        for rank, count in rows.items():
            jobs[rank] = self._job(self.sequences[rank], count)
        self.group.round(jobs)

    def _job(self, sequences: Sequences, count: int) -> Job:
        return Job(rows=count, call=lambda: sequences.step({0: count}), prompts=count > 1)

    def finish(self, *, rows: int) -> None:
        """All the rest, `rows` at a time."""
        while left := {
            rank: min(rows, len(each.prompts[0]) - each.done[0])
            for rank, each in self.sequences.items()
            if each.done[0] < len(each.prompts[0])
        }:
            self.step(left)


def alone(seed: int) -> torch.Tensor:
    """Logits of a rank's prompt, computed by one network that holds every expert."""
    sequences = Sequences(WEIGHTS.network(), [prompt_of(seed)])
    sequences.step({0: len(prompt_of(seed))})
    return sequences.all_logits(0)
