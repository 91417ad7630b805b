"""What operators see of the stored blocks: told by the KV service alone, which looks at all of them. Several of it tell
the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

OWNERS_SHOWN = 1000
"""Those who have most; the others are one, `other`."""

# From a minute to a week, which is the longest that anything is kept.
_AGES: Final = (60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0, 86_400.0, 172_800.0, 345_600.0, 604_800.0)

STORED_VALUES = Gauge("whalepod_kv_stored_values", "Values in the store, by kind (block, image, snapshot).", ["kind"])
STORED_BYTES = Gauge("whalepod_kv_stored_bytes", "Bytes of values in the store, by kind (block, image).", ["kind"])
OWNER_BYTES = Gauge("whalepod_kv_owner_bytes", "Bytes stored on a tenant's account, by its tag.", ["owner"])
MEMORY_BYTES = Gauge("whalepod_kv_memory_bytes", "Memory that the store's servers use.")
MEMORY_MAX_BYTES = Gauge("whalepod_kv_memory_max_bytes", "Memory that the store's servers may use.")
FRAGMENTATION = Gauge("whalepod_kv_fragmentation_ratio", "Fragmentation of the store's worst server.")
EVICTOR_LAG_BYTES = Gauge("whalepod_kv_evictor_lag_bytes", "Bytes that the evictor is still to remove.")
REMOVED = Counter("whalepod_kv_removed", "Blocks removed, by reason (quota, evicted).", ["reason"])
REMOVED_AGE_SECONDS = Histogram(
    "whalepod_kv_removed_age_seconds", "How old removed blocks were.", ["reason"], buckets=_AGES
)


def show_owners(bytes_by_owner: Mapping[int, int]) -> None:
    """In place of those shown before."""
    most = sorted(bytes_by_owner.items(), key=lambda pair: -pair[1])
    OWNER_BYTES.clear()
    for owner, size in most[:OWNERS_SHOWN]:
        OWNER_BYTES.labels(f"{owner:016x}").set(size)
    if rest := most[OWNERS_SHOWN:]:
        OWNER_BYTES.labels("other").set(sum(size for _, size in rest))
