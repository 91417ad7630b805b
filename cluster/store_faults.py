"""Faults of the store's own servers, for staging: a Redis that is gone, stands still, or whose values have rotted.

It takes orders from whoever may write to it, so none has to be signed. Nothing here is used but by `whalepod fault`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

import redis
from redis.exceptions import RedisError

from whalepod.core.errors import UnavailableError

TIMEOUT_S = 5.0
ROTTEN_VALUES_MAX = 1000


def kill_store(urls: Sequence[str]) -> None:
    """Raises UnavailableError, as the others do, if a server does not answer."""
    for url in urls:
        with _server(url) as server:
            server.ping()
            with contextlib.suppress(redis.ConnectionError):  # it has no time to answer
                server.execute_command("SHUTDOWN", "NOSAVE", "NOW", "FORCE")


def pause_store(urls: Sequence[str], *, seconds: float) -> None:
    """Every command waits so long."""
    for url in urls:
        with _server(url) as server:
            server.client_pause(int(1000 * seconds), all=True)


def corrupt_store(urls: Sequence[str]) -> int:
    """One bit of each of so many blocks becomes another; returns how many did."""
    count = 0
    for url in urls:
        with _server(url) as server:
            for key in server.scan_iter(b"b:*", count=ROTTEN_VALUES_MAX):
                value = server.get(key)
                if isinstance(value, bytes) and value and count < ROTTEN_VALUES_MAX:
                    # Which keeps its life.
                    server.execute_command("SETRANGE", key, len(value) - 1, bytes((value[-1] ^ 1,)))
                    count += 1
    return count


@contextlib.contextmanager
def _server(url: str) -> Generator[redis.Redis]:
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S) as server:
            yield server
    except RedisError as error:
        raise UnavailableError(f"the store at {url.rpartition('@')[2]} did not take the order: {error}") from error
