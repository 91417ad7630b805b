"""What one tenant may ask for: requests and tokens a minute, and requests at a time. One router's view.

Requests and tokens are two buckets that fill evenly and hold a minute's worth. Tokens are taken when they are known:
those of a prompt when it has been read, those of an answer as they come. So a bucket may go below zero, and the tenant
waits until it is above again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from whalepod.core.clock import Clock
from whalepod.core.errors import CapacityError

MINUTE_S = 60.0
TENANTS_MAX = 65_536
"""Remembered, newest first: a tenant that has been away for so long has full buckets anyway."""


class TenantLimitError(CapacityError):
    """One tenant's own limit. Other tenants are served."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each tenant. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_max: int | None = None


@dataclass(slots=True)
class Bucket:
    """`used` of what it holds, as of `at_s`. A new one is full."""

    used: float = 0.0
    at_s: float = 0.0

    def take(self, count: int, per_minute: int, now_s: float) -> None:
        self._fill(per_minute, now_s)
        self.used += count

    def wait_s(self, count: int, per_minute: int | None, now_s: float) -> float:
        """Seconds until so many are there; 0: now. More than the bucket holds are there when it is full."""
        if per_minute is None:
            return 0.0
        self._fill(per_minute, now_s)
        missing = min(count, per_minute) + self.used - per_minute
        return max(0.0, missing * MINUTE_S / per_minute)

    def _fill(self, per_minute: int, now_s: float) -> None:
        self.used = max(0.0, self.used - (now_s - self.at_s) * per_minute / MINUTE_S)
        self.at_s = now_s


@dataclass(slots=True)
class Tenant:
    requests: Bucket
    tokens: Bucket
    concurrent: int = 0

    @classmethod
    def new(cls) -> Tenant:
        return cls(Bucket(), Bucket())


class Tenants(Protocol):
    """Where tenants are remembered. Bounded."""

    def opened(self, name: str) -> AbstractContextManager[Tenant, bool | None]:
        """A tenant, to be changed within the block. It is new if it is not known."""
        ...

    def charge_tokens(self, name: str, tokens: int, per_minute: int) -> None:
        """Take them from the tenant's bucket, now or in a moment."""
        ...


class OwnTenants:
    """Of a router that is one process."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()

    def opened(self, name: str) -> AbstractContextManager[Tenant]:
        return nullcontext(self._tenant(name))

    def charge_tokens(self, name: str, tokens: int, per_minute: int) -> None:
        self._tenant(name).tokens.take(tokens, per_minute, self._clock.monotonic_s())

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant.new()
            self._forget_idle()
        self._tenants.move_to_end(name)
        return tenant

    def _forget_idle(self) -> None:
        """The longest unseen, unless it is here."""
        if len(self._tenants) > TENANTS_MAX:
            name = next((name for name, tenant in self._tenants.items() if not tenant.concurrent), None)
            if name is not None:
                del self._tenants[name]


class TenantLimits:
    """For one event loop."""

    def __init__(self, limits: Limits, *, tenants: Tenants | None = None, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants = tenants or OwnTenants(clock=clock)
        self._unlimited = limits == Limits()

    def enter(self, name: str, *, requests: int) -> None:
        """Count requests that come together. Raises TenantLimitError, with the time after which they would pass."""
        if self._unlimited:
            return
        limits = self._limits
        with self._tenants.opened(name) as tenant:
            now_s = self._clock.monotonic_s()
            most = limits.concurrent_max
            if most is not None and tenant.concurrent + min(requests, most) > most:
                raise TenantLimitError(f"more than {most} requests of this tenant at a time", retry_after_s=1.0)
            for what, wait_s in (
                ("requests", tenant.requests.wait_s(requests, limits.requests_per_minute, now_s)),
                ("tokens", tenant.tokens.wait_s(1, limits.tokens_per_minute, now_s)),
            ):
                if wait_s > 0:
                    message = f"this tenant's {what} for this minute are used up"
                    raise TenantLimitError(message, retry_after_s=float(math.ceil(wait_s)))
            if limits.requests_per_minute is not None:
                tenant.requests.take(requests, limits.requests_per_minute, now_s)
            if most is not None:
                tenant.concurrent += requests

    def leave(self, name: str, *, requests: int) -> None:
        """They have ended."""
        if self._limits.concurrent_max is not None:
            with self._tenants.opened(name) as tenant:
                tenant.concurrent -= requests

    def charge_tokens(self, name: str, tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        if self._limits.tokens_per_minute is not None:
            self._tenants.charge_tokens(name, tokens, self._limits.tokens_per_minute)
