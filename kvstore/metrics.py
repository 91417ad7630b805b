"""What operators see of the store client (`kvstore.md` §13). One set a process, on the default registry."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

# 100 µs is a loopback round trip, 10 s is past every deadline.
_SECONDS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

LOOKUPS = Counter("whalepod_kv_lookup", "Prefix lookups by result (hit, partial, miss, skipped, error).", ["result"])
TOKENS = Counter(
    "whalepod_kv_tokens",
    "Prompt tokens by where their KV came from: device, l1 (node cache), store, direct (another rank), recomputed "
    "(nowhere), replayed (of those restored, rows computed again).",
    ["source"],
)
BYTES = Counter("whalepod_kv_bytes", "Value bytes by direction: read, written, served (to other ranks).", ["dir"])
WRITES_DROPPED = Counter("whalepod_kv_write_dropped", "Values the store did not take, by reason.", ["reason"])
VALUES_REFUSED = Counter("whalepod_kv_value_refused", "Values read and not used, by reason.", ["reason"])
IDENTITY_MISMATCHES = Counter("whalepod_kv_identity_mismatch", "Values found under another value's key.")
CHECKSUM_ERRORS = Counter("whalepod_kv_checksum_error", "Values whose checksum was wrong, by shard.", ["shard"])
ERRORS = Counter("whalepod_kv_error", "Error replies, by code.", ["code"])
BREAKER_OPEN_SECONDS = Counter("whalepod_kv_breaker_open_seconds", "Time a shard was not used, by shard.", ["shard"])
SHARDS_SUSPECTED = Counter(
    "whalepod_kv_suspect", "Times a shard was bypassed for its wrong values, by shard.", ["shard"]
)
REDIRECTIONS = Counter("whalepod_kv_redirect", "Redirections followed, by kind (moved, ask, readonly).", ["kind"])
READ_SPEED = Gauge("whalepod_kv_read_bytes_per_second", "Estimate of how fast values come, by shard.", ["shard"])
FETCHES_NOT_WORTH = Counter(
    "whalepod_kv_fetch_not_worth", "Reads left out because the source is so slow that computing is quicker."
)
NODE_CACHE_EVICTED = Counter("whalepod_kv_node_cache_evicted", "Blocks that made room for others in the node cache.")
CONNECTIONS_DISCARDED = Counter("whalepod_kv_conn_discarded", "Connections closed in doubt, by reason.", ["reason"])

# From a second to a week, which is the longest that anything is kept.
_REUSE: Final = (
    1.0,
    10.0,
    60.0,
    300.0,
    900.0,
    3600.0,
    4 * 3600.0,
    12 * 3600.0,
    86400.0,
    2 * 86400.0,
    4 * 86400.0,
    7 * 86400.0,
)

# A hit can lose some tokens, or a whole context.
_LOST: Final = (16, 64, 256, 1024, 4096, 16384, 65536, 262_144, 1_048_576)
_EXCHANGED: Final = tuple(float(4**power) for power in range(7, 14))

LOST_TOKENS = Histogram(
    "whalepod_kv_lost_tokens",
    "Prompt tokens that a hit could have spared, by what lost them: rounding (of a whole hit, to blocks), hole (they "
    "were read behind a block that was not there), deadline (not read in time).",
    ["reason"],
    buckets=_LOST,
)
EXCHANGE_BYTES = Histogram(
    "whalepod_kv_exchange_bytes",
    "Block bytes moved in one exchange with a server or another rank, a few batches, by direction (read, written).",
    ["dir"],
    buckets=_EXCHANGED,
)
LOOKUP_SECONDS = Histogram("whalepod_kv_lookup_seconds", "Time of one prefix lookup.", buckets=_SECONDS)
FETCH_SECONDS = Histogram("whalepod_kv_fetch_seconds", "Time of one fetch, by class.", ["class"], buckets=_SECONDS)
REUSE_INTERVAL_SECONDS = Histogram(
    "whalepod_kv_reuse_interval_seconds",
    "From one use of a stored block to the next, as far as its life is renewed.",
    buckets=_REUSE,
)
STORE_SECONDS = Histogram("whalepod_kv_store_seconds", "Time of one store, by class.", ["class"], buckets=_SECONDS)
