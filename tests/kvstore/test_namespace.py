from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from whalepod.kvstore.namespace import Namespace

BASE = Namespace(
    model_id="m",
    weights_fingerprint=b"w" * 32,
    prompt_version="p",
    compress_ratios=(0, 2),
    kv_sources=(1,),
    index_sources=(1,),
    window_tokens=16,
    rope={"theta": 10000.0},
    record_formats={"GLOBAL_KV": "fp4"},
    block_tokens=16,
    layout="canonical",
    truncation="compact",
    kept_rows=28,
    has_draft=True,
)

OTHERS: dict[str, Any] = {
    "model_id": "n",
    "weights_fingerprint": b"v" * 32,
    "prompt_version": "q",
    "compress_ratios": (0, 1),
    "kv_sources": (),
    "index_sources": (2,),
    "window_tokens": 17,
    "rope": {"theta": 10000},
    "record_formats": {"GLOBAL_KV": "fp8"},
    "block_tokens": 32,
    "layout": "native:1",
    "truncation": "off",
    "kept_rows": 29,
    "has_draft": False,
    "endianness": "big",
    "numerics": "sm90",
}


def test_every_field_separates_namespaces() -> None:
    assert set(OTHERS) == {field.name for field in fields(Namespace)}
    ids = {BASE.id, *(replace(BASE, **{name: value}).id for name, value in OTHERS.items())}
    assert len(ids) == len(OTHERS) + 1


def test_an_id_has_16_bytes_and_does_not_depend_on_the_order_of_a_mapping() -> None:
    one = replace(BASE, rope={"a": 1, "b": 2.0})
    other = replace(BASE, rope={"b": 2.0, "a": 1})
    assert len(one.id) == 16
    assert one.id == other.id


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"kv_sources": (1,), "index_sources": ()}, {"kv_sources": (), "index_sources": (1,)}),
        ({"model_id": "ab", "prompt_version": "c"}, {"model_id": "a", "prompt_version": "bc"}),
    ],
)
def test_what_moves_from_one_field_to_the_next_separates_namespaces(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    assert replace(BASE, **left).id != replace(BASE, **right).id
