"""A canary that goes on: a round now and then beside a cluster that serves, told in metrics and in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import ServingError

from .canary import CanaryPlan, CanaryReport
from .canary_metrics import note_round

log = logging.getLogger(__name__)


async def watch(
    plan: CanaryPlan,
    run: Callable[[CanaryPlan], Awaitable[CanaryReport]],
    passes: Callable[[CanaryReport, CanaryPlan], bool],
    *,
    every_s: float,
    stop: asyncio.Event,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """A round with other requests every `every_s` seconds, or as soon as the one before is over, until `stop` is set.

    A cluster that cannot be reached is a round that has not passed, and no reason to end.
    """
    seed = plan.seed
    while not stop.is_set():
        began_s = clock.monotonic_s()
        asked = replace(plan, seed=seed)
        report: CanaryReport | None = None
        try:
            report = await run(asked)
        except (ServingError, OSError, TimeoutError) as error:
            log.warning("the canary reached no cluster: %s", error)
        passed = report is not None and passes(report, asked)
        seconds = clock.monotonic_s() - began_s
        note_round(report, passed=passed, seconds=seconds)
        if report is not None and not passed:
            log.error("the canary found a difference", extra={"seed": seed, **report.figures()})
        seed += 1
        try:
            async with asyncio.timeout(max(0.0, every_s - seconds)):
                await stop.wait()
        except TimeoutError:
            continue
