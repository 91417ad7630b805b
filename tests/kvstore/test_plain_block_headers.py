from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvstore.test_value_format import HEADER, KEY, LAYOUT, NAMESPACE, VALUE_BYTES, resealed
from whalepod.kvstore.plain_block_headers import PlainBlockHeaders
from whalepod.kvstore.value_format import Flag, Header, encode_header, parse_header, with_checksums

HEADERS = PlainBlockHeaders(NAMESPACE, LAYOUT)
PLAIN = replace(HEADER, draft_fingerprint=0, valid_from=0, mode=0)


@pytest.mark.parametrize("flags", [0, Flag.EXACT])
def test_a_blocks_ordinary_header_is_read(flags: int) -> None:
    raw = encode_header(replace(PLAIN, flags=flags))
    assert HEADERS.read(raw, KEY, value_bytes=VALUE_BYTES) == (PLAIN.checksum, bool(flags))


@pytest.mark.parametrize(
    "header",
    [HEADER, replace(PLAIN, flags=Flag.CRC32C), replace(PLAIN, flags=Flag.CRC32C | Flag.EXACT)],
)
def test_a_valid_header_that_is_not_ordinary_is_left_to_the_full_reader(header: Header) -> None:
    raw = encode_header(header)
    assert HEADERS.read(raw, KEY, value_bytes=VALUE_BYTES) is None
    assert parse_header(raw) == header


def agrees_with_the_full_reader(raw: bytes, *, value_bytes: int = VALUE_BYTES) -> bool:
    """What the quick reader accepts, the full one accepts with the same result."""
    quick = HEADERS.read(raw, KEY, value_bytes=value_bytes)
    if quick is None:
        return True
    full = parse_header(raw)
    return (
        isinstance(full, Header)
        and full.block_refusal(KEY, namespace=NAMESPACE, layout=LAYOUT, value_bytes=value_bytes) is None
        and quick == (full.checksum, full.exact)
    )


@given(at=st.integers(0, 251), new=st.binary(min_size=1, max_size=64))
def test_no_sealed_header_is_accepted_that_the_full_reader_refuses(at: int, new: bytes) -> None:
    assert agrees_with_the_full_reader(resealed(encode_header(PLAIN), at, new[: 252 - at]))


def test_no_changed_byte_is_accepted_that_the_full_reader_refuses() -> None:
    raw = encode_header(PLAIN)
    for at in range(256):
        for bit in (0, 7):
            changed = bytes([*raw[:at], raw[at] ^ (1 << bit), *raw[at + 1 :]])
            assert HEADERS.read(changed, KEY, value_bytes=VALUE_BYTES) is None
            assert at >= 252 or agrees_with_the_full_reader(resealed(raw, at, changed[at : at + 1]))


@given(st.binary(max_size=300))
def test_any_bytes_are_judged_without_raising(raw: bytes) -> None:
    assert HEADERS.read(raw, KEY, value_bytes=VALUE_BYTES) is None


def test_another_length_or_key_is_not_accepted() -> None:
    raw = encode_header(PLAIN)
    assert HEADERS.read(raw, KEY, value_bytes=VALUE_BYTES + 1) is None
    assert HEADERS.read(raw, replace(KEY, depth=4), value_bytes=VALUE_BYTES) is None
    assert HEADERS.read(raw, replace(KEY, parent=KEY.hash), value_bytes=VALUE_BYTES) is None


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_a_header_is_drafted_as_the_full_encoder_writes_it(signed: bool, exact: bool) -> None:
    flags = (Flag.MAC if signed else 0) | (Flag.EXACT if exact else 0)
    header = replace(PLAIN, flags=flags, checksum=77, draft_fingerprint=5, writer=6, created_unix_ms=7)
    headers = PlainBlockHeaders(NAMESPACE, LAYOUT, signed=signed)
    drafts = headers.drafts([(KEY, not exact, 4), (KEY, exact, 5)], writer=6, created_unix_ms=7)
    assert len(drafts) == 512
    draft = drafts[256:]
    assert with_checksums(draft, 77) == encode_header(header)
    assert (draft[112:120], draft[252:]) == (bytes(8), bytes(4))
