"""What one tenant may ask for: requests and tokens a minute, and requests at a time. One router's view.

Requests and tokens are two buckets that fill evenly and hold a minute's worth. Tokens are taken when they are known:
those of a prompt when it has been read, those of an answer as they come. So a bucket may go below zero, and the tenant
waits until it is above again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

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


class _Bucket:
    def __init__(self, per_minute: int | None, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute or 0)
        self._at_s = now_s

    def take(self, count: int, now_s: float) -> None:
        self._fill(now_s)
        self._left -= count

    def wait_s(self, count: int, now_s: float) -> float:
        """Seconds until so many are there; 0: now. More than the bucket holds are there when it is full."""
        if self._per_minute is None:
            return 0.0
        self._fill(now_s)
        missing = min(count, self._per_minute) - self._left
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def _fill(self, now_s: float) -> None:
        if self._per_minute is not None:
            grown = (now_s - self._at_s) * self._per_minute / MINUTE_S
            self._left = min(float(self._per_minute), self._left + grown)
        self._at_s = now_s


class _Tenant:
    def __init__(self, limits: Limits, now_s: float) -> None:
        self.requests = _Bucket(limits.requests_per_minute, now_s)
        self.tokens = _Bucket(limits.tokens_per_minute, now_s)
        self.concurrent = 0


class TenantLimits:
    """For one event loop."""

    def __init__(self, limits: Limits, *, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def enter(self, name: str, *, requests: int) -> None:
        """Count requests that come together. Raises TenantLimitError, with the time after which they would pass."""
        tenant, now_s = self._tenant(name), self._clock.monotonic_s()
        limit = self._limits.concurrent_max
        if limit is not None and tenant.concurrent + min(requests, limit) > limit:
            raise TenantLimitError(f"more than {limit} requests of this tenant at a time", retry_after_s=1.0)
        for what, wait_s in (
            ("requests", tenant.requests.wait_s(requests, now_s)),
            ("tokens", tenant.tokens.wait_s(1, now_s)),
        ):
            if wait_s > 0:
                message = f"this tenant's {what} for this minute are used up"
                raise TenantLimitError(message, retry_after_s=float(math.ceil(wait_s)))
        tenant.requests.take(requests, now_s)
        tenant.concurrent += requests

    def leave(self, name: str, *, requests: int) -> None:
        """They have ended."""
        self._tenant(name).concurrent -= requests

    def charge_tokens(self, name: str, tokens: int) -> None:
        """Tokens of a prompt or an answer."""
        if self._limits.tokens_per_minute is not None:
            self._tenant(name).tokens.take(tokens, self._clock.monotonic_s())

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._limits, self._clock.monotonic_s())
            self._forget_idle()
        self._tenants.move_to_end(name)
        return tenant

    def _forget_idle(self) -> None:
        """The longest unseen, unless it is here."""
        if len(self._tenants) > TENANTS_MAX:
            name = next((name for name, tenant in self._tenants.items() if not tenant.concurrent), None)
            if name is not None:
                del self._tenants[name]
