"""What a run tells: figures that add up over runs, and, of one that was not well, how to see it again."""

from __future__ import annotations

from collections import Counter

from tests.simulation.plans import ASKS
from tests.simulation.world import Outcome


def figures_of(outcome: Outcome) -> Counter[str]:
    """How much of what can happen has happened: a run in which nothing does finds nothing."""
    figures = Counter[str](events=outcome.events)
    for answer in outcome.answers:
        figures[answer.status.name.lower() if answer.status is not None else "unended"] += 1
        if answer.end is None:
            continue
        figures["hit"] += answer.end.cached_tokens > 0
        figures["handed_off"] += bool(answer.end.prefill_rank)
        figures["resumed"] += (answer.end.attempts or 1) > 1
    figures.update(outcome.seen)
    return figures


def report_of(outcome: Outcome) -> str:
    """For people."""
    plan = outcome.plan
    requests = "" if len(plan.asks) == ASKS else f" --requests {len(plan.asks)}"
    pools = "".join(
        f"    {pool} {index}: {options}\n"
        for pool, ranks in (("prefill", plan.prefill), ("decode", plan.decode))
        for index, options in enumerate(ranks)
    )
    troubles = "".join(f"    {event}\n" for event in plan.events)
    return (
        f"python -m tests.simulation --seed {plan.seed}{requests} --verbose      (digest {outcome.digest})\n"
        f"  {plan.routers} routers; ranks:\n{pools}"
        f"  {plan.weather}\n  store: {plan.store_rates}\n  troubles:\n{troubles}"
        "  last of what happened:\n"
        + "".join(f"    {line}\n" for line in outcome.lines)
        + "  wrong:\n"
        + "\n".join(f"    {what}" for what in outcome.wrong)
    )
