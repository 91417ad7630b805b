"""Who may share stored prefixes with whom is decided by who asks, never by what the body says."""

from __future__ import annotations

import pytest

from tests.services.router.fake_ranks import SECRET
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import InvalidFieldError
from whalepod.services.router.tenancy import Principal, principal_from_headers, sharing_salt

A, B = Principal("a"), Principal("b")


def test_a_tenant_shares_with_itself_alone() -> None:
    assert sharing_salt(SECRET, A, None) == sharing_salt(SECRET, A, None)
    assert sharing_salt(SECRET, A, None) != sharing_salt(SECRET, B, None)


def test_a_cache_salt_narrows_and_reaches_no_other_tenant() -> None:
    assert sharing_salt(SECRET, A, "x") != sharing_salt(SECRET, A, None)
    assert sharing_salt(SECRET, A, "x") != sharing_salt(SECRET, A, "y")
    assert sharing_salt(SECRET, A, "x") != sharing_salt(SECRET, B, "x")


def test_an_empty_cache_salt_is_none() -> None:
    assert sharing_salt(SECRET, A, "") == sharing_salt(SECRET, A, None)


def test_no_choice_of_names_makes_two_domains_meet() -> None:
    names = ["a", "ab", "abc", "tenant", "a\x00", "a\x01\x00\x00\x00b"]
    salts = [
        sharing_salt(SECRET, Principal(name, user=user), salt)
        for name in names
        for user in ["", *names]
        for salt in [None, *names]
    ]
    assert len(set(salts)) == len(salts)


def test_a_user_narrows_and_reaches_no_other_tenant() -> None:
    assert sharing_salt(SECRET, A.on_behalf_of("u"), None) == sharing_salt(SECRET, A.on_behalf_of("u"), None)
    assert sharing_salt(SECRET, A.on_behalf_of("u"), None) != sharing_salt(SECRET, A, None)
    assert sharing_salt(SECRET, A.on_behalf_of("u"), None) != sharing_salt(SECRET, B.on_behalf_of("u"), None)
    assert A.on_behalf_of("") == A.on_behalf_of(None) == A


def test_another_cluster_has_other_salts() -> None:
    assert sharing_salt(SECRET, A, None) != sharing_salt(ClusterSecret(b"another secret!!"), A, None)


def test_the_tenant_header_counts_only_behind_a_trusted_proxy() -> None:
    headers = {"x-tenant-id": "b"}
    assert principal_from_headers(headers, trust_tenant_header=True) == B
    assert principal_from_headers(headers, trust_tenant_header=False) == Principal()
    assert principal_from_headers({}, trust_tenant_header=True) == Principal()


def test_impossible_tenants_and_salts_are_refused_by_name() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        principal_from_headers({"x-tenant-id": "t" * 129}, trust_tenant_header=True)
    assert caught.value.field == "x-tenant-id"
    with pytest.raises(InvalidFieldError) as caught:
        sharing_salt(SECRET, A, "s" * 1025)
    assert caught.value.field == "cache_salt"


def test_f29_a_purge_puts_what_was_stored_out_of_reach_for_its_tenant_alone() -> None:
    secret = ClusterSecret(b"s" * 16)
    before = sharing_salt(secret, Principal("a"), "x")
    assert sharing_salt(secret, Principal("a"), "x", epoch=0) == before
    assert sharing_salt(secret, Principal("a"), "x", epoch=5) != before
    assert sharing_salt(secret, Principal("a"), "x", epoch=5) != sharing_salt(secret, Principal("a"), "x", epoch=6)
