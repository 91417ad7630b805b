"""Where the store is and how patient its client may be. Built once at start, handed down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from whalepod.core.errors import ConfigError

REDIS_PORT = 6379
RETENTION_S_MAX = 168 * 3600.0
"""Seven days (`kvstore.md` §7.3)."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """One Redis server: TCP if `host` is set, else the unix socket at `path`."""

    host: str = ""
    port: int = REDIS_PORT
    path: str = ""
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """`redis://[user:password@]host[:port][/database]`, `unix:///path[?db=n]` or `host[:port]`; IPv6 in brackets.

        Raises ConfigError, without repeating a password, on anything else.
        """
        url = text if "://" in text else f"redis://{text}"
        try:
            parts = urlsplit(url)
            database = parts.path.strip("/") if parts.scheme == "redis" else parse_qs(parts.query).get("db", [""])[0]
            address = cls(
                host=parts.hostname or "" if parts.scheme == "redis" else "",
                port=parts.port or REDIS_PORT,
                path=unquote(parts.path) if parts.scheme == "unix" else "",
                database=int(database or 0),
                username=unquote(parts.username or ""),
                password=unquote(parts.password or ""),
            )
        except ValueError as error:
            raise ConfigError("a store address has a port or database that is not a number") from error
        if parts.scheme not in ("redis", "unix") or not (address.host or address.path):
            raise ConfigError(
                "a store address looks like redis://host:6380 or unix:///run/redis.sock; there is no TLS to the store"
            )
        return address

    @property
    def is_local(self) -> bool:
        """Nothing but this machine is between us and the server."""
        return bool(self.path) or self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        """Names the server, without credentials: safe for logs, labels and shard placement."""
        if self.path:
            where = f"unix://{self.path}"
        else:
            where = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return f"{where}/{self.database}" if self.database else where


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of one process's store client. Raises ConfigError on values that cannot work.

    The timeouts bound one exchange with one server and only ever shorten the caller's deadline.
    """

    addresses: tuple[StoreAddress, ...] = ()
    """One per shard. None: there is no store, and every answer is a miss."""
    cluster: bool = False
    """The addresses are nodes of one Redis Cluster, which tells who has what; else each is a server of its own."""
    data_connections: int = 2
    """Connections a shard for values; one more is kept for small commands."""
    connect_timeout_s: float = 0.25
    control_timeout_s: float = 0.25
    data_timeout_s: float = 0.5
    data_bytes_per_s_min: float = 100e6
    """A batch may take `data_timeout_s` and what its bytes take at this rate."""
    batch_bytes_max: int = 4 << 20
    value_bytes_max: int = 64 << 20
    retention_s: float = 24 * 3600.0
    tilt_s_per_block: float = 0.05
    tilt_s_max: float = 300.0
    """Deeper blocks expire earlier, so that `volatile-ttl` removes a prefix from its end (`kvstore.md` §7.2)."""
    touch_interval_s: float = 600.0
    """A hit renews a block's life at most this often."""
    mac_key: bytes | None = field(default=None, repr=False)
    """Set: values are written with a MAC, and none is read without."""
    missing_life_s: float = 1.0
    """A block that the store did not have is not asked for again so long."""
    breaker_failures: int = 5
    probe_interval_s: float = 0.5

    def __post_init__(self) -> None:
        if len({str(address) for address in self.addresses}) != len(self.addresses):
            raise ConfigError("a store address is listed twice")
        if self.data_connections < 1:
            raise ConfigError("data_connections must be at least 1")
        if not self.tilt_s_max < self.retention_s <= RETENTION_S_MAX:
            raise ConfigError(
                f"retention_s must be above tilt_s_max ({self.tilt_s_max:g} s) and at most {RETENTION_S_MAX:g} s,"
                f" not {self.retention_s:g}"
            )
        if self.batch_bytes_max > self.value_bytes_max:
            raise ConfigError("batch_bytes_max must not be above value_bytes_max")

    def block_life_ms(self, depth_blocks: int) -> int:
        return self.block_lives_ms((depth_blocks,))[0]

    def block_lives_ms(self, depths_blocks: Iterable[int]) -> list[int]:
        whole_s, step_s, tilt_s_max = self.retention_s, self.tilt_s_per_block, self.tilt_s_max
        return [round((whole_s - min(step_s * depth, tilt_s_max)) * 1000) for depth in depths_blocks]
