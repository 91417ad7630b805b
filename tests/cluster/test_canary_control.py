"""The control's spoilt snapshot is as valid as the true one, and only its windows are gone."""

from __future__ import annotations

import pytest

from whalepod.cluster.canary_control import zeroed
from whalepod.core.errors import InternalError
from whalepod.kvstore.value_format import (
    HEADER_BYTES,
    Header,
    PartKind,
    ValueClass,
    encode_header,
    parse_header,
    payload_checksum,
    place_parts,
)

PAYLOAD = bytes(range(1, 61))


def snapshot() -> bytes:
    kinds = (PartKind.GLOBAL_KV, PartKind.WINDOW_ROWS, PartKind.DRAFT_ROWS, PartKind.GROUP_STATE, PartKind.STATE)
    header = Header(
        value_class=ValueClass.SNAPSHOT,
        format_id=1,
        namespace=b"n" * 16,
        identity=b"i" * 32,
        payload_bytes=len(PAYLOAD),
        checksum=payload_checksum([PAYLOAD]),
        parts=place_parts((kind, 255, 12) for kind in kinds),
    )
    return encode_header(header) + PAYLOAD


def test_windows_are_zero_the_rest_is_kept_and_the_checksum_agrees() -> None:
    spoilt = zeroed(snapshot())
    header = parse_header(spoilt)
    assert isinstance(header, Header)
    assert header.payload_refusal([spoilt[HEADER_BYTES:]]) is None
    assert spoilt[HEADER_BYTES:] == PAYLOAD[:12] + bytes(24) + PAYLOAD[36:]


def test_what_is_no_snapshot_is_not_spoilt() -> None:
    with pytest.raises(InternalError):
        zeroed(b"nothing of the kind")
