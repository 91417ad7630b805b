"""Two tenants ask the same: neither reads what the other has stored, nor can it tell by the clock what the other has
asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import exp, sqrt
from random import Random

import httpx
import pytest

from tests.e2e.served_cluster import ServedCluster, served_cluster
from whalepod.core.clock import SYSTEM_CLOCK

pytestmark = [pytest.mark.slow, pytest.mark.alone]

REQUESTS = 500
"""Of each arm."""
OWN_HITS_EVERY = 2
PROMPT_WORDS = 220
"""So many that computing them takes a time that can be told from a hit's."""
P_MIN = 0.001
WORDS = ("whale", "sea", "quiet", "deep", "song", "cold", "light", "ship", "salt", "wind", "star", "north")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    flags = ("--trust-tenant-header", "--log-level", "warning")
    with served_cluster(tmp_path_factory.mktemp("serve"), *flags) as cluster:
        yield cluster


def ask(client: httpx.Client, prompt: str, *, tenant: str) -> tuple[float, int]:
    """Seconds to the first token, and the tokens of the prompt that were hit."""
    body = {
        "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    first_s, cached, start_s = None, 0, SYSTEM_CLOCK.monotonic_s()
    with client.stream("POST", "/v1/completions", json=body, headers={"x-tenant-id": tenant}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            first_s = first_s or SYSTEM_CLOCK.monotonic_s() - start_s
            if usage := json.loads(data).get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert first_s is not None
    return first_s, cached


def prompt_of(draw: Random) -> str:
    return " ".join(draw.choices(WORDS, k=PROMPT_WORDS))


def ks_p(one: Sequence[float], other: Sequence[float]) -> float:
    """Two-sample Kolmogorov–Smirnov: how likely samples of one distribution differ at least so much (asymptotic)."""
    distance = max(
        abs(sum(x <= at for x in one) / len(one) - sum(x <= at for x in other) / len(other)) for at in (*one, *other)
    )
    size = sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:  # the series does not converge, and the answer is near 1
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * scaled) ** 2) for k in range(1, 101))))


def test_the_measure_tells_distributions_apart() -> None:
    draw = Random(5)
    one, same = ([draw.gauss(1, 0.1) for _ in range(500)] for _ in range(2))
    assert ks_p(one, same) > 0.01
    assert ks_p(one, [x + 0.04 for x in same]) < P_MIN


@pytest.mark.timeout(1200)
def test_what_another_tenant_has_asked_shows_neither_in_hits_nor_in_time(cluster: ServedCluster) -> None:
    draw = Random(20_261_130)
    asked_by_other: list[float] = []
    asked_by_nobody: list[float] = []
    own: list[float] = []
    with cluster.client() as client:
        for _ in range(20):  # caches of the process itself, not of prompts
            ask(client, prompt_of(draw), tenant="spy")
        for number in range(REQUESTS):
            theirs, fresh = prompt_of(draw), prompt_of(draw)
            ask(client, theirs, tenant="owner")
            arms = [(theirs, asked_by_other), (fresh, asked_by_nobody)]
            draw.shuffle(arms)
            for prompt, times in arms:
                seconds, cached = ask(client, prompt, tenant="spy")
                assert cached == 0, "a hit on what another tenant has stored"
                times.append(seconds)
            if number % OWN_HITS_EVERY == 0:  # all along: how busy the machine is changes
                seconds, cached = ask(client, theirs, tenant="owner")
                assert cached > 0, "one's own prompt is hit"
                own.append(seconds)
    assert ks_p(own, asked_by_nobody) < P_MIN, "a hit can be told by the clock: the test would notice one"
    assert ks_p(asked_by_other, asked_by_nobody) > P_MIN
