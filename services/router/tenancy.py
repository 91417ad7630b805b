"""Who asks, and with whom they share stored prefixes (`kvstore.md` §2.4).

    salt = HMAC(cluster secret, domain [‖ frame(cache_salt)] [‖ epoch])
    domain = frame("tenant") ‖ frame(tenant)     or     frame("user") ‖ frame(tenant) ‖ frame(user)

The tenant comes from the authenticated principal, never from the body: a client's `user` and `cache_salt` divide its
own tenant further and reach no other. The epoch is that of the tenant's last purge, 8 bytes: what was stored before is
out of reach from then on, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whalepod.core.block_keys import frame
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import InvalidFieldError

DEFAULT_TENANT = "default"
TENANT_HEADER = "x-tenant-id"
TENANT_CHARS_MAX = 128
CACHE_SALT_CHARS_MAX = 1024
USER_CHARS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf a request runs."""

    tenant: str = DEFAULT_TENANT
    key_name: str = ""
    """Of the API key; empty: none was needed."""
    user: str = ""
    """Whom the client answers for, by its own word; empty: it does not say."""
    priority_min: int | None = None
    """Smallest `priority` it may have: what asks for a smaller one goes first only as far as this. None: any."""

    def priority(self, asked: int) -> int:
        """What a request of this priority gets."""
        return asked if self.priority_min is None else max(asked, self.priority_min)

    def on_behalf_of(self, user: str | None) -> Principal:
        """The same, divided further: `user` has at most USER_CHARS_MAX characters."""
        return self if (user or "") == self.user else replace(self, user=user or "")


def principal_from_headers(headers: Mapping[str, str], *, trust_tenant_header: bool) -> Principal:
    """`headers` by lower-case name. Raises InvalidFieldError on a tenant that cannot be one."""
    tenant = headers.get(TENANT_HEADER) if trust_tenant_header else None
    if tenant is None:
        return Principal()
    if not 1 <= len(tenant) <= TENANT_CHARS_MAX:
        raise InvalidFieldError(TENANT_HEADER, f"{TENANT_HEADER} must have 1 to {TENANT_CHARS_MAX} characters")
    return Principal(tenant)


def sharing_salt(secret: ClusterSecret, principal: Principal, cache_salt: str | None, *, epoch: int = 0) -> bytes:
    """32 bytes: the sharing domain of a request. Raises InvalidFieldError on an overlong `cache_salt`."""
    tenant, user = principal.tenant.encode(), principal.user.encode("utf-8", "surrogatepass")
    domain = frame(b"user") + frame(tenant) + frame(user) if user else frame(b"tenant") + frame(tenant)
    if cache_salt:
        if len(cache_salt) > CACHE_SALT_CHARS_MAX:
            raise InvalidFieldError("cache_salt", f"cache_salt must have at most {CACHE_SALT_CHARS_MAX} characters")
        domain += frame(cache_salt.encode("utf-8", "surrogatepass"))
    if epoch:
        domain += epoch.to_bytes(8, "little")
    return secret.mac(Purpose.SALT, domain)
