"""Request traces as chains of blocks, in order of arrival; and cache policies simulated over them."""

from __future__ import annotations

import gzip
import json
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parent.parent / "traces"
DAY_S = 86_400.0
MOONCAKE_BLOCK_TOKENS = 512
POOL_KEYS = 16
"""Candidates for eviction that the server remembers."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A prompt: when it comes, its length, and names of its full objects, each of `object_tokens`."""

    at_s: float
    tokens: int
    chain: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    requests: Sequence[TracedRequest]
    object_tokens: int

    @property
    def tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


def load_trace(name: str, *, object_tokens: int, seed: int, share: float) -> Trace:
    """`name`: agentic, conversation or synthetic. Agentic sessions start uniformly over a day; `share` of them."""
    if name == "agentic":
        requests = list(_agentic(object_tokens, seed, share))
    else:
        requests = list(_mooncake(TRACES / f"mooncake_fast25_{name}.jsonl.gz", object_tokens))
    return Trace(sorted(requests, key=lambda request: request.at_s), object_tokens)


def _agentic(object_tokens: int, seed: int, share: float) -> Iterator[TracedRequest]:
    draw = random.Random(seed)
    with gzip.open(TRACES / "agentic_coding_runs.jsonl.gz", "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            start_s, kept = draw.uniform(0.0, DAY_S), draw.random() < share
            if not kept:
                continue
            session = json.loads(line)
            step = object_tokens // session["block_size"]
            for request in _flattened(session["requests"]):
                ids = [first + i for first, count in request["hash_runs"] for i in range(count)]
                full = min(len(ids), request["in"] // session["block_size"]) // step
                # An object is named by its last block, whose id stands for everything before it.
                chain = tuple(b"%d.%d" % (number, ids[(index + 1) * step - 1]) for index in range(full))
                yield TracedRequest(start_s + request["t"], request["in"], chain)


def _flattened(requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for request in requests:
        if "hash_runs" in request:
            yield request
        yield from _flattened(request.get("requests", ()))


def _mooncake(path: Path, object_tokens: int) -> Iterator[TracedRequest]:
    step = max(1, object_tokens // MOONCAKE_BLOCK_TOKENS)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ids = row["hash_ids"][: row["input_length"] // MOONCAKE_BLOCK_TOKENS]
            chain = tuple(b"%d" % ids[(index + 1) * step - 1] for index in range(len(ids) // step))
            yield TracedRequest(row["timestamp"] / 1000, row["input_length"], chain)


def leaf_first_lru(trace: Trace, *, objects: int) -> float:
    """Share of prompt tokens hit. A request uses a whole prefix, so touching leaves before roots keeps leaves first."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hit = 0
    for request in trace.requests:
        hit += _leading(cache, request.chain)
        for name in reversed(request.chain):
            cache[name] = None
            cache.move_to_end(name)
        while len(cache) > objects:
            cache.popitem(last=False)
    return hit * trace.object_tokens / trace.tokens


def sampled_lru(trace: Trace, *, objects: int, samples: int, seed: int) -> float:
    """`allkeys-lru` as the server does it: samples go to a pool of candidates, whose longest unused is evicted. Roots
    are touched first."""
    draw = random.Random(seed)
    used: dict[bytes, int] = {}
    names: list[bytes] = []
    places: dict[bytes, int] = {}
    pool: list[tuple[int, bytes]] = []
    hit = now = 0
    for request in trace.requests:
        hit += _leading(used, request.chain)
        for name in request.chain:
            now += 1
            if name not in used:
                places[name] = len(names)
                names.append(name)
            used[name] = now
        while len(names) > objects:
            drawn = (names[draw.randrange(len(names))] for _ in range(samples))
            pool = sorted({*pool, *((used[name], name) for name in drawn)})[:POOL_KEYS]
            victim = pool.pop(0)[1]
            if victim not in used:
                continue
            place, last = places.pop(victim), names.pop()
            if last != victim:
                names[place], places[last] = last, place
            del used[victim]
    return hit * trace.object_tokens / trace.tokens


def _leading(cache: Any, chain: Sequence[bytes]) -> int:  # noqa: ANN401  anything that can be asked
    for count, name in enumerate(chain):
        if name not in cache:
            return count
    return len(chain)
