"""Whether this router can serve, told truthfully: a pool without a usable rank makes it not ready."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from whalepod.core.errors import UnavailableError
from whalepod.engine.interface import FinishReason
from whalepod.engine.sampling_params import SamplingParams

from .front_door import FrontDoor
from .job import Ending
from .tenancy import Principal

PROBE_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """`reasons` is empty if and only if the router is ready."""

    reasons: tuple[str, ...]
    pools: dict[str, int]
    registry_ok: bool
    store_ok: bool

    @property
    def ready(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """Registry and store may be away while the router is ready: it knows its ranks and they can compute."""
        return {
            "status": "ready" if self.ready else "unavailable",
            "reasons": list(self.reasons),
            "pools": {name: {"ranks": count} for name, count in self.pools.items()},
            "registry": "ok" if self.registry_ok else "unreachable",
            "store": "ok" if self.store_ok else "unreachable",
        }


@dataclass(slots=True)
class Readiness:
    """`needs_prefill`: the cluster has a prefill pool, so an empty one is a fault. `settled`: every rank that is there
    has been heard from. A router that knew only some of them would send these all that comes."""

    front: FrontDoor
    needs_prefill: bool
    registry_ok: Callable[[], bool]
    settled: Callable[[], bool] = lambda: True
    draining: bool = field(default=False, init=False)

    def report(self) -> ReadinessReport:
        table = self.front.table
        pools = {"prefill": len(table.prefill_ranks()), "decode": len(table.decode_ranks())}
        if vision := table.vision_ranks():
            pools["vision"] = len(vision)  # without them text is served as ever
        reasons: list[str] = []
        if self.draining:
            reasons.append("the router is shutting down")
        if not self.settled():
            reasons.append("not every rank has been heard from")
        if not pools["decode"]:
            reasons.append("no decode rank is usable")
        if self.needs_prefill and not pools["prefill"]:
            reasons.append("no prefill rank is usable")
        return ReadinessReport(tuple(reasons), pools, self.registry_ok(), self.front.lookup.healthy)


async def generates_a_token(front: FrontDoor) -> None:
    """Raises ServingError unless the cluster really generates a token now."""
    caller = front.caller(Principal(), timeout_s=PROBE_TIMEOUT_S)
    async with front.admitted(caller, choices=1):
        prompt = [front.language.bos_token_id]
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        (job,) = await front.jobs(caller, prompt, sampling, fidelity=front.model.fidelity_default)
        async with aclosing(front.run(job, caller)) as progress:
            async for item in progress:
                if isinstance(item, Ending) and item.reason in (FinishReason.STOP, FinishReason.LENGTH):
                    return
    raise UnavailableError("no token came back")
