"""What the dashboard shows beside the router's own numbers: the servers of the store, and what was set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.store_connection import store_settings
from whalepod.core.clock import Clock, Deadline
from whalepod.kvstore.server_check import ServerInfo, server_info

STORE_PATIENCE_S: Final = 1.0
"""For all servers together: one that stands still must not hold up the page."""
_HIDDEN: Final = "secret"
_CREDENTIALS: Final = re.compile(r"//[^/@]*@")


@dataclass(frozen=True, slots=True)
class DashboardSources:
    """`store` asks the servers of the store, and waits for them for a moment: by address, None for one that does not
    answer. `settings`: those that are not the defaults, without secrets. `process`: which this is of how many that
    share the router's ports."""

    store: Callable[[], Mapping[str, ServerInfo | None]] = dict
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    process: tuple[int, int] = (1, 1)


def dashboard_sources(config: ClusterConfig, index: int, clock: Clock) -> DashboardSources:
    """`index`: which of `router.processes`, from 0. Raises ConfigError."""
    addresses = store_settings(config, secret=None).addresses

    def ask() -> Mapping[str, ServerInfo | None]:
        deadline = Deadline.after(STORE_PATIENCE_S, clock)
        return {str(address): server_info(address, deadline=deadline) for address in addresses}

    return DashboardSources(ask, shown_settings(config), (index + 1, config.router.process_count))


def shown_settings(config: ClusterConfig) -> dict[str, str]:
    """By key, as in the YAML file. Passwords in addresses are left out."""
    values = config.without_secret().model_dump(mode="json", exclude_defaults=True)
    flat = _flat(values, "")
    return {
        key: _CREDENTIALS.sub("//…@", str(value)) for key, value in flat if _HIDDEN not in key and value is not None
    }


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
