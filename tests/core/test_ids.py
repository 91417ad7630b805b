"""Identifiers are wide enough and never repeat."""

from __future__ import annotations

from whalepod.core.ids import REQUEST_ID_BYTES, mint_incarnation, mint_request_id


def test_request_ids_have_their_width_and_do_not_repeat() -> None:
    ids = {mint_request_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(request_id) for request_id in ids} == {REQUEST_ID_BYTES}


def test_incarnations_differ_and_fit_a_signed_64_bit_field() -> None:
    incarnations = {mint_incarnation() for _ in range(1000)}
    assert len(incarnations) == 1000
    assert all(0 <= incarnation < 2**63 for incarnation in incarnations)
