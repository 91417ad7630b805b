"""Pools of ranks: one Ray actor for each rank, and in it the rank's own gRPC server.

A pool is a placement group with one bundle for each rank. A rank whose process dies is started again by Ray, with the
same name and port and a new incarnation; routers find it by its registration. Nobody asks an actor anything to serve.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from whalepod.core.clock import Deadline
from whalepod.core.ids import RankId
from whalepod.core.logs import configure_logging

from .config import ClusterConfig
from .worker_signals import calling_on_sigterm

log = logging.getLogger(__name__)

RANK_ENTRY_POINTS: Mapping[str, tuple[str, str]] = {
    "prefill": ("whalepod.services.prefill.process", "run_prefill_rank"),
    "decode": ("whalepod.services.decode.process", "run_decode_rank"),
    "vision": ("whalepod.services.vision.process", "run_vision_rank"),
}
"""Services are started by name: the cluster knows their commands, not their code."""

RESTART_PAUSE_S = 1.0
PLACES_DUE_S = 10.0
"""After so long without a place, somebody is told what is missing."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank `index` of `pool`."""

    pool: str
    index: int

    @property
    def rank_id(self) -> RankId:
        return RankId(f"{self.pool}-{self.index}")

    def takes_requests(self, config: ClusterConfig) -> bool:
        """Routers send it some; to a rank that follows another they do not."""
        return self.pool != "prefill" or config.prefill_role(self.index).is_prefill


def rank_places(config: ClusterConfig) -> Iterator[RankPlace]:
    for pool in RANK_ENTRY_POINTS:
        for index in range(config.pool(pool).replicas):
            yield RankPlace(pool, index)


class RankActor:
    """One rank inside a Ray worker process."""

    def __init__(self, config_json: str, secret: str, place: RankPlace) -> None:
        self._config = on_this_node(ClusterConfig.model_validate_json(config_json).with_secret(secret))
        self._place = place
        self._stop = asyncio.Event()
        self._is_over = False
        self._was_ready = _is_started_again()
        configure_logging(level=self._config.log_level, as_json=self._config.log_json)

    def __repr__(self) -> str:
        """The prefix of this rank's lines in the driver's log."""
        return self._place.rank_id

    async def serve(self) -> None:
        """Serve until `stop`. When this process dies, Ray calls this again in a new one.

        SIGTERM is for this process, not for the rank: it drains, ends the process with 0, and Ray starts another one.
        Raises what kept the rank from ever getting ready: it would meet that again. What ends a rank that was ready
        once ends the process, and Ray tries again.
        """
        module, function = RANK_ENTRY_POINTS[self._place.pool]
        run: Callable[..., Awaitable[None]] = getattr(importlib.import_module(module), function)
        try:
            with calling_on_sigterm(self._on_sigterm):
                await run(self._config, self._place.index, stop=self._stop, on_ready=self._note_ready)
        except Exception:
            if not self._was_ready:
                raise
            log.critical("the rank failed and is started again", exc_info=True)
            await asyncio.sleep(RESTART_PAUSE_S)
            os._exit(1)
        if not self._is_over:
            os._exit(0)

    async def stop(self) -> None:
        """Let `serve` drain and return."""
        self._is_over = True
        self._stop.set()

    def _on_sigterm(self) -> None:
        log.info("SIGTERM: %s drains", self._place.rank_id)
        self._stop.set()

    def _note_ready(self, _: object) -> None:
        self._was_ready = True


def _is_started_again() -> bool:
    """Whether Ray has started this actor before, in a process that died."""
    import ray  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Ray's property warns of another of its own properties
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class RankPools:
    """The ranks of one cluster. All calls from the thread that started Ray."""

    def __init__(self, config: ClusterConfig, *, secret: str) -> None:
        self._config = config
        self._secret = secret
        self._actors: dict[RankId, Any] = {}
        self._serving: dict[RankId, Any] = {}
        self._groups: dict[str, Any] = {}
        self._replacing: set[RankId] = set()
        self._started = count(1)
        self._places_due: Deadline | None = None
        self._unplaced: list[str] = []
        """Pools that Ray had no room for when it was last asked."""

    @property
    def rank_ids(self) -> list[RankId]:
        return list(self._actors)

    def start(self) -> None:
        """Reserve places and start every rank. Returns before they are ready: they register when they are."""
        from ray.util.placement_group import placement_group  # noqa: PLC0415  Ray reads the environment when imported

        places = list(rank_places(self._config))
        for pool in dict.fromkeys(place.pool for place in places):
            in_pool = [place for place in places if place.pool == pool]
            strategy = "STRICT_PACK" if self._config.ray.one_node else "PACK"
            self._groups[pool] = placement_group([bundle(self._config, pool)] * len(in_pool), strategy=strategy)
            for place in in_pool:
                self.start_rank(place)
        self._unplaced = list(self._groups)
        self._places_due = Deadline.after(PLACES_DUE_S)

    def start_rank(self, place: RankPlace, config: ClusterConfig | None = None) -> None:
        """Start a rank that is not there, in its reserved place; one beyond those has none. `config`: what it is told,
        if not what the others were."""
        import ray  # noqa: PLC0415
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

        config = config or self._config
        wanted = bundle(config, place.pool)
        cpus, gpus = wanted.pop("CPU"), wanted.pop("GPU", 0)
        actor_class: Any = ray.remote(RankActor)
        options: dict[str, Any] = {"num_cpus": cpus if config.ray.address is not None else 0, "num_gpus": gpus}
        options["resources"] = wanted
        if place.index < self._config.pool(place.pool).replicas:
            group = self._groups[place.pool]
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place.index)
            options = {"num_cpus": cpus, "num_gpus": gpus, "resources": wanted, "scheduling_strategy": strategy}
        actor = actor_class.options(
            name=f"{place.rank_id}/{next(self._started)}", max_restarts=-1, max_task_retries=-1, **options
        ).remote(config.without_secret().model_dump_json(), self._secret, place)
        self._actors[place.rank_id] = actor
        self._serving[place.rank_id] = actor.serve.remote()

    def without_places(self) -> list[str]:
        """Pools for which Ray still has no room PLACES_DUE_S after `start`, as sentences; looked at once. They go on
        waiting: a cluster that scales itself may be making room."""
        import ray  # noqa: PLC0415

        if self._places_due is None or not self._places_due.expired:
            return []
        self._places_due = None
        self._look_for_places()
        free = ray.available_resources() if self._unplaced else {}
        sentences: list[str] = []
        for pool in self._unplaced:
            wanted = bundle(self._config, pool)
            replicas = self._config.pool(pool).replicas
            where = "on one machine" if self._config.ray.one_node else "on any machines"
            sentences.append(
                f"{pool} waits for a place in Ray: {replicas} x {_quantities(wanted)} {where}, and not taken there are "
                f"{_quantities({name: free.get(name, 0.0) for name in wanted})}; add machines, or lower {pool}.replicas"
            )
        return sentences

    def note_all_placed(self) -> None:
        """Every rank was seen to serve: nobody asks Ray's head about places any more."""
        self._places_due, self._unplaced = None, []

    def ask_to_stop(self, rank_id: RankId) -> None:
        """Let a rank drain and end. That is no failure of it."""
        self._replacing.add(rank_id)
        self._actors[rank_id].stop.remote()

    def has_ended(self, rank_id: RankId) -> bool:
        return bool(_wait([self._serving[rank_id]], timeout_s=0)[0])

    def forget(self, rank_id: RankId) -> None:
        """End what is left of a rank, and free its place."""
        import ray  # noqa: PLC0415

        ray.kill(self._actors.pop(rank_id), no_restart=True)
        self._serving.pop(rank_id)
        self._replacing.discard(rank_id)

    def failures(self) -> dict[RankId, str]:
        """Ranks that ended for good, and why."""
        ended, _ = _wait(list(self._serving.values()), timeout_s=0)
        return {
            rank_id: _reason(reference)
            for rank_id, reference in self._serving.items()
            if reference in ended and rank_id not in self._replacing
        }

    def stop(self, *, timeout_s: float) -> None:
        """Ask every rank to drain, and wait for that at most so long. Leaving Ray ends what is left.

        Needs the ranks only, once they all have a place: Ray's head may be dead.
        """
        self._look_for_places()
        unplaced = {rank_id for rank_id in self._actors if rank_id.rpartition("-")[0] in self._unplaced}
        for rank_id in self._actors.keys() - unplaced:
            self._actors[rank_id].stop.remote()
        _wait([self._serving[rank_id] for rank_id in self._actors.keys() - unplaced], timeout_s=timeout_s)

    def _look_for_places(self) -> None:
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415

        groups = self._groups
        self._unplaced = [pool for pool in self._unplaced if placement_group_table(groups[pool])["state"] == "PENDING"]


def bundle(config: ClusterConfig, pool: str) -> dict[str, float]:
    """What Ray reserves for one rank. With GPUs, it also names them to the rank's process, which sees no others."""
    settings = config.pool(pool)
    wanted = {"CPU": settings.cpus}
    if settings.gpus:
        wanted["GPU"] = settings.gpus
    if config.ray.pool_resources:
        wanted[f"whalepod_{pool}"] = 1
    return wanted


def on_this_node(config: ClusterConfig) -> ClusterConfig:
    """`config` of a rank in a Ray of many machines: the settings name one address, and each rank is at its own."""
    if config.ray.address is None or config.advertise_host is not None or config.host not in ("0.0.0.0", "::"):
        return config
    import ray.util  # noqa: PLC0415

    return config.model_copy(update={"advertise_host": ray.util.get_node_ip_address()})


def _quantities(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _wait(references: list[Any], *, timeout_s: float) -> tuple[list[Any], list[Any]]:
    """Those that have ended within so long, and the others."""
    import ray  # noqa: PLC0415

    return ray.wait(references, num_returns=len(references), timeout=timeout_s) if references else ([], [])


def _reason(reference: Any) -> str:  # noqa: ANN401  Ray's references are untyped
    import ray  # noqa: PLC0415
    from ray.exceptions import RayError, RayTaskError  # noqa: PLC0415

    try:
        ray.get(reference)
    except RayTaskError as error:
        return str(error.cause)
    except RayError as error:
        return str(error)
    return "it stopped"
