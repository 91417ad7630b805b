"""A group whose ranks are threads of this process: the same dispatch, the same rounds, bytes that stay in memory. For
tests, and to see what 64 ranks would do on a machine that has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from whalepod.kernels.quantise import PackedFormat
from whalepod.model.checkpoint import EngramTable
from whalepod.model.config import ModelConfig
from whalepod.model.network import Network

from .expert_bank import ExpertBank
from .group import Agreement, ExpertGroup, GroupOptions, Job
from .placement import Placement, even_placement
from .rebalancing import RebalanceOptions, Rebalancer
from .transport import GroupBrokenError, MemoryHub


def even_placements(config: ModelConfig, ranks: int, *, redundant: int = 0) -> dict[str, Placement]:
    """Of every layer and draft block, by prefix. Draft blocks get the same share of redundant slots."""
    target = even_placement(config.n_routed_experts, ranks, redundant=redundant)
    placements = {f"layers.{layer}.ffn.": target for layer in range(config.num_hidden_layers)}
    experts = config.dspark_n_routed_experts
    if config.num_nextn_predict_layers:
        spare = redundant * experts // config.n_routed_experts
        draft = even_placement(experts, ranks, redundant=spare)
        placements |= {f"mtp.{block}.ffn.": draft for block in range(config.num_nextn_predict_layers)}
    return placements


class MemoryGroup:
    """`ranks` networks that share the tensors of everything but routed experts."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        ranks: int,
        redundant: int = 0,
        engram_tables: Mapping[int, EngramTable] | None = None,
        token_map: Tensor | None = None,
        input_format: PackedFormat | None = None,
        options: GroupOptions | None = None,
        rebalancing: RebalanceOptions | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        placements = even_placements(config, ranks, redundant=redundant)
        self._hubs = MemoryHub(ranks, timeout_s=timeout_s), MemoryHub(ranks, timeout_s=timeout_s)
        self.networks: list[Network] = []
        self.groups: list[ExpertGroup] = []
        self.rebalancers: list[Rebalancer] = []
        for transport, mover in zip(*(hub.transports() for hub in self._hubs), strict=True):
            bank = ExpertBank(transport.rank, placements)
            self.networks.append(
                Network(
                    config,
                    tensors,
                    engram_tables=engram_tables or {},
                    token_map=token_map,
                    input_format=input_format,
                    make_experts=bank.make,
                )
            )
            own = [placements[layer.prefix] for layer in bank.layers]
            group = ExpertGroup(transport, bank, own, options=options)
            self.groups.append(group)
            self.rebalancers.append(Rebalancer(group, mover, options=rebalancing or RebalanceOptions(interval_steps=0)))
        self._threads = ThreadPoolExecutor(ranks, "logical-rank")

    def round(self, jobs: Sequence[Job | None]) -> Agreement:
        """One round of all ranks, `jobs` by rank, and what happens between two steps. Raises what a job has raised."""
        rounds = [self._threads.submit(self._round, rank, job) for rank, job in enumerate(jobs)]
        errors = [error for each in rounds if (error := each.exception()) is not None]
        if errors:  # the others only say that somebody has left
            raise next((error for error in errors if not isinstance(error, GroupBrokenError)), errors[0])
        agreements = [each.result() for each in rounds]
        for job in jobs:
            if job is not None and job.error is not None:
                raise job.error
        assert all(agreement == agreements[0] for agreement in agreements), "ranks came to different agreements"
        return agreements[0]

    def look_at_loads(self) -> None:
        """What every rank does when the interval of its rebalancer is over."""
        list(self._threads.map(Rebalancer.look, self.rebalancers))

    def close(self) -> None:
        for hub in self._hubs:
            hub.barrier.abort()
        self._threads.shutdown()

    def _round(self, rank: int, job: Job | None) -> Agreement:
        rebalancer = self.rebalancers[rank]
        agreement = self.groups[rank].round(job, staged_layers=rebalancer.staged_layers)
        rebalancer.after(agreement)
        return agreement
