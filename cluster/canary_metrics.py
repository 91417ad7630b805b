"""What a canary that runs beside a cluster has found, for alerts."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from .canary import CanaryReport

ROUNDS = Counter("whalepod_canary_rounds", "Rounds by outcome: passed, failed, unreachable.", ["outcome"])
REQUESTS = Counter("whalepod_canary_requests", "Requests compared with one process that has no store.")
DIFFERENT = Counter("whalepod_canary_different", "Of those, requests whose tokens or log-probabilities differed.")
FAILED = Counter("whalepod_canary_failed_requests", "Of those, requests that the cluster did not answer.")
PASSED = Gauge("whalepod_canary_passed", "Whether the last round passed: 1, 0.")
ROUND_SECONDS = Histogram(
    "whalepod_canary_round_seconds", "Time of one round.", buckets=(1, 5, 10, 30, 60, 120, 300, 600)
)


def note_round(report: CanaryReport | None, *, passed: bool, seconds: float) -> None:
    """Count one round. None: the cluster could not be reached."""
    outcome = "unreachable" if report is None else "passed" if passed else "failed"
    ROUNDS.labels(outcome).inc()
    PASSED.set(int(passed))
    ROUND_SECONDS.observe(seconds)
    if report is not None:
        REQUESTS.inc(report.requests)
        DIFFERENT.inc(report.different + report.logprob_different)
        FAILED.inc(report.failed)
