"""What clients see when a process is killed under their streams: nothing broken, nothing different, and a pause.

    python benchmarks/failover.py [--streams N] [--tokens N] [--victims decode-0,prefill-0,redis]

A cluster of real processes on this machine, with a spare rank of each kind, answers N streams at once: greedy, drawn
with a seed, bounded by a JSON schema, and tool calls, all in `exact`. First undisturbed. Then, for each victim, again,
and it gets `kill -9` when a third of the events have come. What must hold: every stream ends well and says the same.
The bound of the pause is what restoring and recomputing take beside the other streams; it is printed as p50 and p99
over the streams that were moved. No peer: none runs this model on a CPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

from failover_cases.cluster import RunningCluster, running_cluster
from failover_cases.streams import Asked, Seen, run_all, streams

KILL_AFTER_SHARE = 1 / 3
VICTIMS = ("decode-0", "decode-1", "prefill-0", "prefill-1", "redis")


@dataclass(slots=True)
class Outcome:
    """Of one round."""

    streams: int = 0
    broken: int = 0
    different: int = 0
    repeated: int = 0
    pauses_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--victims", default="decode-0,prefill-0,redis", help=f"of {', '.join(VICTIMS)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    victims: list[str] = options.victims.split(",")
    if unknown := set(victims).difference(VICTIMS):
        parser.error(f"--victims: {', '.join(sorted(unknown))}: is none of {', '.join(VICTIMS)}")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores; whalepod serve, 2 prefill and 2 decode ranks")
    asked = streams(options.streams, tokens=options.tokens)
    with (
        tempfile.TemporaryDirectory(prefix="failover-") as directory,
        running_cluster(Path(directory), prefill=2, decode=2) as cluster,
    ):
        truth = asyncio.run(run_all(cluster.url, asked))
        check_truth(asked, truth)
        outcomes = {victim: asyncio.run(disturbed(cluster, asked, truth, victim)) for victim in victims}
        names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
        cluster.wait_until_whole(names)
        leaked = {name: cluster.blocks_in_use(name) for name in names}
    report(outcomes, leaked)


def check_truth(asked: Sequence[Asked], truth: Sequence[Seen]) -> None:
    for one, seen in zip(asked, truth, strict=True):
        if seen.broken:
            raise SystemExit(f"an undisturbed stream ({one.kind}) broke: {seen.error or 'no end'}")
    lengths = Counter(one.kind for one in asked)
    print("undisturbed:", ", ".join(f"{count} {kind}" for kind, count in lengths.items()))


async def disturbed(cluster: RunningCluster, asked: Sequence[Asked], truth: Sequence[Seen], victim: str) -> Outcome:
    """The same streams, and a kill in the middle."""
    cluster.wait_until_whole(["prefill-0", "prefill-1", "decode-0", "decode-1", "redis"])
    events_total = sum(len(seen.times_s) for seen in truth)
    moved_before = cluster.streams_moved()
    events, killed_at = 0, [0.0]

    def on_event() -> None:
        nonlocal events
        events += 1
        if events == int(events_total * KILL_AFTER_SHARE):
            killed_at[0] = cluster.signal(victim, signal.SIGKILL)

    seen = await run_all(cluster.url, asked, on_event=on_event)
    moved = cluster.streams_moved() - moved_before
    outcome = Outcome(streams=len(asked))
    typical_s = _percentile([gap for one in truth for gap in _gaps(one)], 50)
    for one, (now, before) in zip(asked, zip(seen, truth, strict=True), strict=True):
        outcome.broken += now.broken
        outcome.different += not now.broken and (now.text, now.finish) != (before.text, before.finish)
        outcome.repeated += len(now.text) > len(before.text)
        if now.broken:
            print(f"  broken ({one.kind}): {now.error or 'no end'}")
    pauses_s = [pause_s for one in seen if (pause_s := one.pause_s(killed_at[0])) is not None]
    outcome.pauses_s = sorted(pauses_s, reverse=True)[:moved]  # those that were moved paused longest
    print(
        f"kill -9 {victim}: {outcome.streams} streams, {outcome.broken} broken, {outcome.different} different, "
        f"{len(pauses_s)} in mid stream, {moved} moved, pause p50 {_ms(outcome.pauses_s, 50):.0f} ms, "
        f"p99 {_ms(outcome.pauses_s, 99):.0f} ms (typical gap {typical_s * 1000:.0f} ms)"
    )
    return outcome


def report(outcomes: dict[str, Outcome], leaked: dict[str, int]) -> None:
    print("blocks in use when all was over:", ", ".join(f"{name} {count}" for name, count in leaked.items()))
    pauses = [pause for victim, one in outcomes.items() if victim.startswith("decode") for pause in one.pauses_s]
    figures = {
        "streams": sum(one.streams for one in outcomes.values()),
        "broken": sum(one.broken for one in outcomes.values()),
        "different": sum(one.different for one in outcomes.values()),
        "tokens_repeated": sum(one.repeated for one in outcomes.values()),
        "pause_ms_p50": round(_ms(pauses, 50), 1),
        "pause_ms_p99": round(_ms(pauses, 99), 1),
        "blocks_leaked": sum(leaked.values()),
    }
    print(json.dumps(figures))


def _gaps(seen: Seen) -> list[float]:
    return [after - before for before, after in zip(seen.times_s, seen.times_s[1:], strict=False)]


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _ms(values: Sequence[float], percent: int) -> float:
    return 1000 * _percentile(values, percent)


if __name__ == "__main__":
    main()
