"""What share of prompt tokens a store of a given size would have hit, on recorded requests and a real Redis.

    python benchmarks/kv_traces.py --trace agentic [--object-tokens N] [--share F] [--port N]

Objects are stand-ins of a few bytes under the keys' own expiry rule (`kvstore/settings.py`): each use sets a key's
expiry to the retention, less a tilt for its depth, in the trace's time. The server's memory limit is what so many
stand-ins take. `hit` is with the evictor, whose low mark is the size; `volatile_ttl` without it. In the same run: exact
leaf-first LRU, of the size and (`exact_high`) of the evictor's high mark, up to which it lets a store grow;
`allkeys-lru`, simulated, for the server's clock ticks in seconds and cannot be replayed quickly; and the server's own
`allkeys-lfu` and `volatile-ttl` without the tilt. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import cast

import redis
from kv_cases.contenders import redis_client
from kv_cases.server import benchmark_server
from kv_cases.traces import Trace, TracedRequest, leaf_first_lru, load_trace, sampled_lru

from whalepod.kvstore.caretaker import EVICT_HIGH, EVICT_LOW
from whalepod.kvstore.eviction import plan_eviction
from whalepod.kvstore.settings import StoreSettings
from whalepod.kvstore.survey import StoredBlock

SEED = 20_261_129
STAND_IN = b"x" * (8 << 10)
"""Large beside what a client's buffers take of the server's memory, which counts too."""
USE = """
local hits = 0
for i = 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 0 then break end
  hits = i
end
for i = #KEYS, 1, -1 do
  local at = ARGV[1] - math.min(ARGV[2] * (i - 1), ARGV[3])
  if i <= hits then redis.call('PEXPIREAT', KEYS[i], at) else redis.call('SET', KEYS[i], ARGV[4], 'PXAT', at) end
end
return hits
"""
"""KEYS: a prompt's objects from the root on. ARGV: expiry in Unix ms, tilt in ms a block, largest tilt, stand-in."""
LIVES = """
local lives = {}
for i = 1, #KEYS do lives[i] = redis.call('PTTL', KEYS[i]) end
return lives
"""
KEYS_AT_ONCE = 4000
"""Lua's stack bounds the keys of one call."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", choices=("agentic", "conversation", "synthetic"), default="agentic")
    parser.add_argument("--object-tokens", type=int, default=1024, help="tokens of one object; 256 takes four times")
    parser.add_argument("--share", type=float, default=1.0, help="of the sessions; sizes shrink with it")
    parser.add_argument("--millions", type=int, nargs="+", default=[2, 4], help="sizes, in millions of tokens")
    parser.add_argument("--port", type=int, default=16_391, help="for the server that is started here")
    options = parser.parse_args()
    trace = load_trace(options.trace, object_tokens=options.object_tokens, seed=SEED, share=options.share)
    print(f"{options.trace}: {len(trace.requests)} prompts, {trace.tokens / 1e6:.0f} M tokens, seed {SEED}")
    figures: dict[str, float] = {}
    with benchmark_server(options.port) as server:
        print(f"redis {server.version}, objects of {options.object_tokens} tokens")
        client = redis_client(server.unix)
        for millions in options.millions:
            objects = int(millions * 1e6 * options.share) // options.object_tokens
            figures |= {f"{name}_{millions}m": share for name, share in _shares(client, trace, objects).items()}
    print(json.dumps({name: round(100 * share, 2) for name, share in figures.items()}))


def _shares(client: redis.Redis, trace: Trace, objects: int) -> dict[str, float]:
    tilt_ms = round(StoreSettings().tilt_s_per_block * 1000)
    shares = {
        "exact": leaf_first_lru(trace, objects=objects),
        "exact_high": leaf_first_lru(trace, objects=round(objects * EVICT_HIGH / EVICT_LOW)),
        "allkeys_lru": sampled_lru(trace, objects=objects, samples=5, seed=SEED),
        "hit": _tended(client, trace, objects, tilt_ms=tilt_ms),
        "volatile_ttl": _replayed(client, trace, objects, policy="volatile-ttl", tilt_ms=tilt_ms),
        "volatile_ttl_untilted": _replayed(client, trace, objects, policy="volatile-ttl", tilt_ms=0),
        "allkeys_lfu": _replayed(client, trace, objects, policy="allkeys-lfu", tilt_ms=0),
    }
    for name, share in shares.items():
        print(f"  {objects:6} objects {name:24}{100 * share:8.2f} %", flush=True)
    return shares


def _with_progress(trace: Trace, what: str) -> Iterator[TracedRequest]:
    """The trace's requests; says every 20 seconds how far it is."""
    told_at_s = time.perf_counter()
    for number, request in enumerate(trace.requests):
        yield request
        if time.perf_counter() - told_at_s > 20:
            told_at_s = time.perf_counter()
            print(f"  {what}: {100 * number / len(trace.requests):.0f} % of the requests", flush=True)


def _replayed(client: redis.Redis, trace: Trace, objects: int, *, policy: str, tilt_ms: int) -> float:
    """Share of prompt tokens hit on the real server."""
    _limit(client, objects, policy)
    use = client.register_script(USE)
    settings = StoreSettings()
    base_ms = time_ms(client) + round(settings.retention_s * 1000)
    hit = 0
    for request in _with_progress(trace, policy):
        expiry = base_ms + round(request.at_s * 1000)
        chain = request.chain[:KEYS_AT_ONCE]
        if chain:
            hit += cast("int", use(keys=chain, args=[expiry, tilt_ms, round(settings.tilt_s_max * 1000), STAND_IN]))
    return hit * trace.object_tokens / trace.tokens


def _tended(client: redis.Redis, trace: Trace, objects: int, *, tilt_ms: int) -> float:
    """Share of prompt tokens hit with the evictor's plan: `objects` is its low mark, and expiries are the server's."""
    client.config_set("maxmemory", 0)
    client.flushall(asynchronous=False)
    use, lives_of = client.register_script(USE), client.register_script(LIVES)
    settings = StoreSettings()
    base_ms = time_ms(client) + round(settings.retention_s * 1000)
    parents: dict[bytes, bytes] = {}
    hit = 0
    for request in _with_progress(trace, "evictor"):
        chain = request.chain[:KEYS_AT_ONCE]
        if chain:
            expiry = base_ms + round(request.at_s * 1000)
            hit += cast("int", use(keys=chain, args=[expiry, tilt_ms, round(settings.tilt_s_max * 1000), b"x"]))
            parents |= zip(chain, (b"", *chain[:-1]), strict=True)
        if len(parents) > objects * EVICT_HIGH / EVICT_LOW:
            names = list(parents)
            lives: list[int] = []
            for at in range(0, len(names), KEYS_AT_ONCE):
                lives += cast("list[int]", lives_of(keys=names[at : at + KEYS_AT_ONCE]))
            stored = [
                StoredBlock(name, name, parent, b"", 0, 0, 1, left_ms)
                for (name, parent), left_ms in zip(parents.items(), lives, strict=True)
            ]
            doomed = plan_eviction(stored, bytes_to_free=len(stored) - objects, keys_max=len(stored))
            client.unlink(*(block.key for block in doomed))
            for block in doomed:
                del parents[block.key]
    return hit * trace.object_tokens / trace.tokens


def _limit(client: redis.Redis, objects: int, policy: str) -> None:
    """Empty the server, and let it hold as many stand-ins as `objects`."""
    client.config_set("maxmemory", 0)
    client.flushall(asynchronous=False)
    names = (b"%d.%d" % (number, number) for number in range(objects))
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.set(name, STAND_IN, px=86_400_000)
        pipeline.execute()
    full = cast("dict[str, int]", client.info("memory"))["used_memory"]
    client.flushall(asynchronous=False)
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory-samples", 10)
    client.config_set("maxmemory", full)


def time_ms(client: redis.Redis) -> int:
    """The server's own clock."""
    seconds, micros = cast("tuple[int, int]", client.time())
    return seconds * 1000 + micros // 1000


if __name__ == "__main__":
    main()
