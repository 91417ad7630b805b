"""The side of a rank that keeps it in its group, whose ranks share the experts or divide prompts: membership, the loop
of steps, and a watch over them."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence

import grpc
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from whalepod.core.clock import Clock, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import ConfigError, UnavailableError
from whalepod.core.ids import Incarnation
from whalepod.engine.context_parallel.loop import HEAD, ContextLoop, ContextShare
from whalepod.engine.expert_parallel.group import GroupOptions
from whalepod.engine.expert_parallel.group_loop import GroupLoop, GroupState, LoopOptions
from whalepod.engine.expert_parallel.rebalancing import RebalanceOptions
from whalepod.engine.expert_parallel.seat import PooledExperts, Seat

from .config import ClusterConfig
from .group_membership import GroupMembership
from .group_metrics import collector_of
from .group_peers import GroupPeers
from .group_servicer import GroupServicer
from .peer_tls import PeerTls
from .rank_addresses import rank_addresses

log = logging.getLogger(__name__)

WATCH_S = 1.0
READY_PATIENCE_S = 300.0
READY_LOOK_S = 0.05
STRAGGLER_PASSES_MIN = 100
"""Fewer say nothing: a machine has other things to do now and then."""
STRAGGLER_SECONDS_MIN = 0.005


def seat_of(config: ClusterConfig, *, pool: str, index: int) -> Seat | None:
    """None: every rank of the pool holds all experts."""
    settings = config.prefill if pool == "prefill" else config.decode
    return Seat(index, settings.replicas, settings.redundant_experts) if settings.expert_parallel else None


def computes_in_group(config: ClusterConfig, *, pool: str) -> bool:
    """Whether ranks of the pool need each other for a step."""
    return seat_of(config, pool=pool, index=0) is not None or _group_size(config, pool) > 1


def group_addresses(config: ClusterConfig, pool: str, index: int) -> tuple[Sequence[str], int]:
    """Of the ranks that rank `index` of the pool computes with, and its index among them."""
    size = _group_size(config, pool)
    addresses = rank_addresses(config, pool)
    if size == 1:
        return addresses, index
    first = index - index % size
    return addresses[first : first + size], index - first


def _group_size(config: ClusterConfig, pool: str) -> int:
    """Ranks that divide prompts."""
    return config.prefill.context_parallel if pool == "prefill" else 1


class RankGroup:
    """One rank's. For the event loop, unless it says otherwise."""

    def __init__(
        self,
        config: ClusterConfig,
        pool: str,
        index: int,
        *,
        incarnation: Incarnation,
        secret: ClusterSecret,
        tls: PeerTls | None,
        clock: Clock,
    ) -> None:
        self._config = config
        self._clock = clock
        addresses, self._index = group_addresses(config, pool, index)
        self._size = len(addresses)
        peers = GroupPeers(addresses, index=self._index, secret=secret, tls=tls, clock=clock)
        self._membership = GroupMembership(
            peers, incarnation=incarnation, host=config.reachable_host, device=config.engine.device, clock=clock
        )
        self._servicer = GroupServicer(self._membership, secret=secret, clock=clock)
        self.loop: GroupLoop | ContextLoop | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._collector: Collector | None = None

    def register(self, server: grpc.aio.Server) -> None:
        self._servicer.register(server)

    def share_experts(self, experts: PooledExperts, *, on_failure: Callable[[BaseException], None]) -> None:
        """For any thread, once: the model is loaded, the engine not made yet. Raises ConfigError."""
        eplb = self._config.eplb
        for placement in experts.placements.values():
            if placement.experts % eplb.nodes:
                raise ConfigError(
                    f"eplb.nodes ({eplb.nodes}) does not divide the {placement.experts} experts of a layer"
                )
        loop = GroupLoop(
            experts.bank,
            self._membership,
            experts.read,
            options=LoopOptions(
                slots_per_rank=experts.slots_per_rank,
                group=GroupOptions(window_steps=eplb.window_steps),
                rebalancing=RebalanceOptions(
                    interval_steps=eplb.interval_steps, gain_min=eplb.gain_min, nodes=eplb.nodes
                ),
            ),
            on_failure=on_failure,
            clock=self._clock,
        )
        self.loop = experts.loop = loop

    def share_prompts(self, *, on_failure: Callable[[BaseException], None]) -> ContextShare:
        """As `share_experts`: what the rank's model is given."""
        loop = ContextLoop(self._membership, is_head=self._index == HEAD, on_failure=on_failure, clock=self._clock)
        self.loop = loop
        return ContextShare(loop, self._config.prefill.context_parallel_rows_min)

    async def start(self) -> None:
        """Join the group. The server listens already. Raises UnavailableError if no group forms."""
        assert self.loop is not None
        self._membership.attach(self.loop)
        self.loop.start()
        self._watchdog = asyncio.create_task(self._watch_own_steps(self.loop), name="step-watchdog")
        patience = Deadline.after(READY_PATIENCE_S, self._clock)
        while not self.loop.ready.is_set():  # no thread waits: it could not be interrupted
            if patience.expired:
                raise UnavailableError(f"this rank's group did not form within {READY_PATIENCE_S:g} s")
            await asyncio.sleep(READY_LOOK_S)
        self._collector = collector_of(self.loop, ranks_wanted=self._size)
        REGISTRY.register(self._collector)

    async def stop(self) -> None:
        """Leave the group; the others go on without this rank. Before the engine is stopped."""
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
            self._collector = None
        if self._watchdog is not None:
            self._watchdog.cancel()
            await asyncio.gather(self._watchdog, return_exceptions=True)
        await self._membership.stop()
        if self.loop is not None:
            await asyncio.to_thread(self.loop.stop)

    async def _watch_own_steps(self, loop: GroupLoop | ContextLoop) -> None:
        """A step that never ends holds up every rank: say where it hangs, and end this process. Names slow ranks."""
        limit_s = self._config.eplb.step_timeout_seconds
        named: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(WATCH_S)
            started_s = loop.computing_since_s
            if started_s is not None and self._clock.monotonic_s() - started_s > limit_s:
                log.critical("a step has not ended for %g s: ending this process", limit_s)
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                os._exit(1)
            if isinstance(loop, ContextLoop):
                continue
            state = loop.state
            slow = straggler(state)
            if slow is not None and (state.epoch, slow) != named:
                named = (state.epoch, slow)
                log.warning("rank %d is slow: %s", slow, [f"{seconds * 1e3:.1f} ms" for seconds in state.step_seconds])


def straggler(state: GroupState) -> int | None:
    """The index in the pool of a rank whose passes take twice the median and noticeably long, if there is one."""
    if state.compared_passes < STRAGGLER_PASSES_MIN or len(state.step_seconds) < 2:
        return None
    median = sorted(state.step_seconds)[(len(state.step_seconds) - 1) // 2]
    slowest = max(range(len(state.step_seconds)), key=state.step_seconds.__getitem__)
    slow = state.step_seconds[slowest] > max(2 * median, STRAGGLER_SECONDS_MIN)
    return state.members[slowest] if slow else None
