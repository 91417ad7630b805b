"""Where the ranks of a pool listen, and where they reach each other.

together      one machine, or one that all are reached at: rank i listens i above its pool's port
ranks_apart   each has an address of its own, as pods have, and listens on the port itself
"""

from __future__ import annotations

from .config import ClusterConfig, join_address


def rank_port(config: ClusterConfig, pool: str, index: int) -> int:
    """Where rank `index` (from 0) of `pool` listens."""
    return config.pool(pool).port + (0 if config.ranks_apart else index)


def rank_addresses(config: ClusterConfig, pool: str) -> list[str]:
    """Where the ranks of `pool` reach each other, in order."""
    return [
        join_address(
            config.reachable_host if config.rank_host is None else config.rank_host.format(pool=pool, index=index),
            rank_port(config, pool, index),
        )
        for index in range(config.pool(pool).replicas)
    ]
