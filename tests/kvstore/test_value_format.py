from __future__ import annotations

import struct
from dataclasses import replace

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.core.block_keys import BlockHash, BlockKey
from whalepod.kvstore.value_format import (
    ALL_LAYERS,
    HEADER_BYTES,
    BlockLayout,
    Flag,
    FormatId,
    Header,
    Part,
    PartKind,
    Refusal,
    ValueClass,
    encode_header,
    parse_header,
    payload_checksum,
)

NAMESPACE = bytes(range(16))
KEY = BlockKey(hash=BlockHash(b"h" * 32), parent=BlockHash(b"p" * 32), depth=3, run=b"r" * 8)
LAYOUT = BlockLayout.from_layers(
    block_tokens=16, format_id=FormatId.FLOAT32, global_kv={2: 40, 5: 80}, index_keys={2: 12}
)
PAYLOAD = bytes(range(132))
HEADER = Header(
    value_class=ValueClass.BLOCK,
    format_id=FormatId.FLOAT32,
    namespace=NAMESPACE,
    identity=KEY.hash,
    payload_bytes=132,
    checksum=payload_checksum([PAYLOAD]),
    parts=LAYOUT.parts,
    flags=Flag.EXACT,
    parent=KEY.parent,
    depth_blocks=3,
    tokens=16,
    writer=2**63 - 1,
    created_unix_ms=1_790_000_000_000,
    draft_fingerprint=2**64 - 1,
    valid_from=7,
    mode=0x0102,
)
VALUE_BYTES = HEADER_BYTES + 132


def resealed(raw: bytes, at: int, new: bytes) -> bytes:
    """The header with some bytes changed and a checksum that covers the change."""
    body = raw[:at] + new + raw[at + len(new) : 252]
    return body + struct.pack("<I", google_crc32c.value(body))


def test_a_header_survives_the_round_trip() -> None:
    raw = encode_header(HEADER)
    assert len(raw) == HEADER_BYTES
    assert parse_header(raw) == HEADER
    assert parse_header(memoryview(raw + b"payload")) == HEADER


def test_fields_lie_where_other_writers_expect_them() -> None:
    raw = encode_header(HEADER)
    assert raw[:8] == b"DIKV\x01\x00\x00\x01"
    assert raw[8:16] == bytes([1, 0, 0, 0, 1, 0, 2, 0])
    assert (raw[16:32], raw[32:64], raw[64:96]) == (NAMESPACE, KEY.hash, KEY.parent)
    assert struct.unpack_from("<IIQQ", raw, 96) == (3, 16, 132, HEADER.checksum)
    assert struct.unpack_from("<QQQIHH", raw, 120) == (2**63 - 1, 1_790_000_000_000, 2**64 - 1, 7, 3, 0x0102)
    assert struct.unpack_from("<BBHII", raw, 152 + 12) == (PartKind.GLOBAL_KV, 5, 0, 40, 80)
    assert raw[152 + 36 : 252] == bytes(64)


def test_checksums_are_the_published_functions() -> None:
    assert payload_checksum([]) == 0x2D06800538D394C2  # xxh3-64 of nothing
    assert payload_checksum([b"1234", b"56789"], crc=True) == 0xE3069283  # CRC-32C's check value
    assert payload_checksum([b"abc"]) == payload_checksum([b"a", memoryview(b"bc")])


def test_any_changed_byte_of_the_header_is_noticed() -> None:
    for at in range(HEADER_BYTES):
        raw = bytearray(encode_header(HEADER))
        raw[at] ^= 0x40
        assert parse_header(raw) in (Refusal.MAGIC, Refusal.HEADER_CHECKSUM)


@pytest.mark.parametrize(
    ("at", "new", "refusal"),
    [
        (4, b"\x02\x00", Refusal.VERSION),
        (6, b"\x40\x01", Refusal.HEADER_LENGTH),
        (8, b"\x04", Refusal.FLAGS),
        (11, b"\x80", Refusal.FLAGS),
        (104, b"\x85", Refusal.PARTS),
        (148, b"\x02", Refusal.RESERVED),
        (148, b"\x09", Refusal.PARTS),
        (154, b"\x01", Refusal.RESERVED),
        (156, b"\x01", Refusal.PARTS),
        (160, b"\x29", Refusal.PARTS),
        (200, b"\x01", Refusal.RESERVED),
        (248, b"\x01", Refusal.RESERVED),
    ],
)
def test_a_sealed_header_that_breaks_a_rule_is_refused_by_that_rule(at: int, new: bytes, refusal: Refusal) -> None:
    assert parse_header(resealed(encode_header(HEADER), at, new)) is refusal


@given(st.binary(max_size=600))
def test_any_bytes_are_a_header_or_a_refusal(data: bytes) -> None:
    assert isinstance(parse_header(data), Refusal)  # 2^-64 against a header by chance


@given(at=st.integers(0, 251), new=st.binary(min_size=1, max_size=64))
def test_any_sealed_header_is_judged_without_raising(at: int, new: bytes) -> None:
    header = parse_header(resealed(encode_header(HEADER), at, new[: 252 - at]))
    if isinstance(header, Header):
        header.block_refusal(KEY, namespace=NAMESPACE, layout=LAYOUT, value_bytes=VALUE_BYTES)
        refusal = header.snapshot_refusal(
            KEY.hash, namespace=NAMESPACE, format_id=2, value_bytes=VALUE_BYTES, value_bytes_max=1 << 20
        )
        assert refusal is not None or header.value_class == ValueClass.SNAPSHOT
        assert sum(part.bytes for part in header.parts) == header.payload_bytes


def block_refusal(
    header: Header, *, key: BlockKey = KEY, value_bytes: int = VALUE_BYTES, exact_only: bool = False
) -> Refusal | None:
    return header.block_refusal(key, namespace=NAMESPACE, layout=LAYOUT, value_bytes=value_bytes, exact_only=exact_only)


def test_the_block_that_was_asked_for_is_accepted() -> None:
    assert block_refusal(HEADER) is None
    assert block_refusal(replace(HEADER, flags=0)) is None
    assert HEADER.payload_refusal([PAYLOAD[:5], PAYLOAD[5:]]) is None


@pytest.mark.parametrize(
    ("header", "refusal"),
    [
        (replace(HEADER, value_class=ValueClass.SNAPSHOT), Refusal.CLASS),
        (replace(HEADER, namespace=bytes(16)), Refusal.NAMESPACE),
        (replace(HEADER, format_id=FormatId.RELEASE), Refusal.FORMAT),
        (replace(HEADER, identity=bytes(32)), Refusal.IDENTITY),
        (replace(HEADER, parent=bytes(32)), Refusal.IDENTITY),
        (replace(HEADER, depth_blocks=4), Refusal.IDENTITY),
        (replace(HEADER, tokens=15), Refusal.IDENTITY),
        (replace(HEADER, payload_bytes=131), Refusal.LENGTH),
        (replace(HEADER, parts=LAYOUT.parts[:2], payload_bytes=120), Refusal.LENGTH),
        (replace(HEADER, parts=(replace(LAYOUT.parts[0], layer=3), *LAYOUT.parts[1:])), Refusal.PARTS),
    ],
)
def test_a_block_that_is_not_the_one_asked_for_is_refused(header: Header, refusal: Refusal) -> None:
    assert block_refusal(header) is refusal


def test_approximate_blocks_are_refused_where_exact_ones_are_asked_for() -> None:
    assert block_refusal(replace(HEADER, flags=0), exact_only=True) is Refusal.NOT_EXACT
    assert block_refusal(HEADER, exact_only=True) is None


def test_a_wrong_payload_is_refused_with_either_checksum() -> None:
    crc = replace(HEADER, flags=Flag.CRC32C, checksum=payload_checksum([PAYLOAD], crc=True))
    wrong = bytes([PAYLOAD[0] ^ 1]) + PAYLOAD[1:]
    assert crc.payload_refusal([PAYLOAD]) is None
    assert crc.payload_refusal([wrong]) is Refusal.CHECKSUM
    assert HEADER.payload_refusal([wrong]) is Refusal.CHECKSUM


def test_f18_only_a_newer_peers_values_and_approximate_ones_are_left_alone() -> None:
    kept = {refusal for refusal in Refusal if not refusal.is_corrupt}
    assert kept == {Refusal.VERSION, Refusal.HEADER_LENGTH, Refusal.FLAGS, Refusal.FORMAT, Refusal.NOT_EXACT}


def test_a_snapshot_is_refused_above_the_limit_before_anything_else_is_believed() -> None:
    snapshot = replace(HEADER, value_class=ValueClass.SNAPSHOT, payload_bytes=1 << 40)
    refusal = snapshot.snapshot_refusal(
        KEY.hash, namespace=NAMESPACE, format_id=2, value_bytes=HEADER_BYTES + (1 << 40), value_bytes_max=1 << 20
    )
    assert refusal is Refusal.LENGTH


def test_parts_that_leave_gaps_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="should start at 40"):
        encode_header(replace(HEADER, parts=(LAYOUT.parts[0], Part(kind=1, layer=5, offset_bytes=48, bytes=84))))
    with pytest.raises(ValueError, match="cover 120 of 132"):
        encode_header(replace(HEADER, parts=LAYOUT.parts[:2]))


def test_a_layout_names_each_source_or_one_part_a_kind_when_there_are_too_many() -> None:
    assert [(part.kind, part.layer, part.offset_bytes, part.bytes) for part in LAYOUT.parts] == [
        (PartKind.GLOBAL_KV, 2, 0, 40),
        (PartKind.GLOBAL_KV, 5, 40, 80),
        (PartKind.INDEX_KEYS, 2, 120, 12),
    ]
    many = BlockLayout.from_layers(
        block_tokens=16, format_id=2, global_kv=dict.fromkeys(range(6), 8), index_keys=dict.fromkeys(range(3), 4)
    )
    assert [(part.kind, part.layer, part.bytes) for part in many.parts] == [
        (PartKind.GLOBAL_KV, ALL_LAYERS, 48),
        (PartKind.INDEX_KEYS, ALL_LAYERS, 12),
    ]
    assert many.payload_bytes == 60
