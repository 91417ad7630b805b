from __future__ import annotations

import pytest

from tests.kvstore.values import chain
from whalepod.core.ids import RequestId
from whalepod.kvstore.store_keys import (
    block_store_key,
    handoff_snapshot_key,
    shard_tag,
    snapshot_identity,
    turn_snapshot_key,
)


def test_blocks_of_a_run_and_snapshots_at_their_borders_share_a_tag() -> None:
    keys = chain(40)
    tags = [shard_tag(block_store_key(key)) for key in keys]
    assert tags == [keys[depth - depth % 16].hash[:8].hex().encode() for depth in range(40)]
    assert shard_tag(turn_snapshot_key(keys[20], mode=1)) == tags[16]


def test_names_differ_by_everything_they_are_made_of() -> None:
    key, other = chain(2)
    one, two = RequestId(b"1" * 16), RequestId(b"2" * 16)
    names = [
        block_store_key(key),
        block_store_key(other),
        turn_snapshot_key(key, mode=1),
        turn_snapshot_key(key, mode=256),
        turn_snapshot_key(other, mode=1),
        handoff_snapshot_key(one, 1),
        handoff_snapshot_key(one, 11),
        handoff_snapshot_key(two, 1),
    ]
    assert len(set(names)) == len(names)
    assert len({snapshot_identity(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        (b"b:{0011}:\x7b}{", b"0011"),
        (b"plain", b"plain"),
        (b"{}x", b"{}x"),
        (b"a{b", b"a{b"),
        (b"}a{b}", b"b"),
    ],
)
def test_a_tag_is_what_a_redis_cluster_would_hash(name: bytes, tag: bytes) -> None:
    assert shard_tag(name) == tag
