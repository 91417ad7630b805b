"""Who asks: an API key, the header of a trusted proxy, or anybody.

The file of keys is looked at again while the router runs: a key that is taken out stops working within a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from whalepod.cluster.api_keys import ApiKey, Scope, hash_of_key, read_api_keys
from whalepod.cluster.config import RouterSettings
from whalepod.core.clock import SYSTEM_CLOCK, Clock
from whalepod.core.errors import AuthenticationError, ConfigError, ForbiddenError

from .tenancy import Principal, principal_from_headers

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
BEARER = "bearer "
NEEDED = "an API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"


class Authenticator:
    """For one event loop."""

    def __init__(
        self,
        *,
        keys_file: Path | None = None,
        trust_tenant_header: bool = False,
        priority_min: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`priority_min`: of those whose key does not say. Raises ConfigError on a bad file of keys."""
        self._file = keys_file
        self._trust_tenant_header = trust_tenant_header
        self._priority_min = priority_min
        self._clock = clock
        self._keys: Mapping[str, ApiKey] = {}
        self._version: object = None
        self._looked_s = clock.monotonic_s()
        if keys_file is not None:
            self._version = _version_of(keys_file)
            self._keys = read_api_keys(keys_file)

    @classmethod
    def from_settings(cls, settings: RouterSettings, *, clock: Clock = SYSTEM_CLOCK) -> Authenticator:
        """Raises ConfigError."""
        return cls(
            keys_file=settings.api_keys_file,
            trust_tenant_header=settings.trust_tenant_header,
            priority_min=settings.priority_min,
            clock=clock,
        )

    @property
    def keys_known(self) -> bool:
        """Whether callers are told apart by keys at all."""
        return self._file is not None

    def principal(self, headers: Mapping[str, str], *, scope: Scope = "generate") -> Principal:
        """`headers` by lower-case name, with `-`.

        Raises AuthenticationError (no key, a wrong or an expired one), ForbiddenError (a key of another scope),
        InvalidFieldError (an impossible tenant).
        """
        if self._file is None:
            anybody = principal_from_headers(headers, trust_tenant_header=self._trust_tenant_header)
            return anybody if self._priority_min is None else replace(anybody, priority_min=self._priority_min)
        self._look_again(self._file)
        key = self._keys.get(hash_of_key(_presented(headers)))
        if key is None:
            raise AuthenticationError("this API key is not known here")
        if key.expired(self._clock.unix_ms()):
            raise AuthenticationError("this API key has expired")
        if scope not in key.scopes:
            raise ForbiddenError(f"this API key is not for {scope}")
        priority_min = self._priority_min if key.priority_min is None else key.priority_min
        return Principal(key.tenant, key_name=key.name, priority_min=priority_min)

    def _look_again(self, file: Path) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s < LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        version = _version_of(file)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_api_keys(file)
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.info("API keys read again", extra={"keys": len(self._keys)})


def _presented(headers: Mapping[str, str]) -> str:
    bearer = headers.get("authorization", "")
    key = bearer[len(BEARER) :].strip() if bearer.lower().startswith(BEARER) else headers.get("x-api-key", "")
    if not key:
        raise AuthenticationError(NEEDED)
    return key


def _version_of(file: Path) -> object:
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
