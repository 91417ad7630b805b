"""Block hashes agree with a second implementation, and two prompts share a block only if all before it is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whalepod.core.block_keys import (
    HASH_BYTES,
    NAMESPACE_BYTES,
    RUN_BLOCKS,
    BlockHash,
    block_keys,
    chain_root,
    derive_block_hashes,
)


class Vector(TypedDict):
    """One line of block_key_vectors.json, which block_key_vectors.pl wrote. Bytes are hexadecimal."""

    name: str
    namespace: str
    salt: str
    adapter: str
    block_tokens: int
    token_ids: list[int]
    extras: dict[str, str]
    root: str
    hashes: list[str]


VECTORS = cast(list[Vector], json.loads(Path(__file__).with_name("block_key_vectors.json").read_text(encoding="utf-8")))
NAMESPACE = bytes(NAMESPACE_BYTES)
ROOT = chain_root(NAMESPACE, salt=b"tenant")

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_hashes_are_those_of_the_second_implementation(vector: Vector) -> None:
    root = chain_root(
        bytes.fromhex(vector["namespace"]), salt=bytes.fromhex(vector["salt"]), adapter=bytes.fromhex(vector["adapter"])
    )
    hashes = derive_block_hashes(
        vector["token_ids"],
        root=root,
        block_tokens=vector["block_tokens"],
        extras={int(depth): bytes.fromhex(extra) for depth, extra in vector["extras"].items()},
    )
    assert root.hex() == vector["root"]
    assert [block_hash.hex() for block_hash in hashes] == vector["hashes"]


def test_chains_that_must_differ_do() -> None:
    by_name = {vector["name"]: vector for vector in VECTORS}
    for one, other in [
        ("salt", "another salt"),
        ("salt", "adapter"),
        ("salt that looks like an adapter", "adapter that looks like a salt"),
    ]:
        assert by_name[one]["token_ids"] == by_name[other]["token_ids"]
        assert not set(by_name[one]["hashes"]) & set(by_name[other]["hashes"])
    one, other = by_name["image across a border"]["hashes"], by_name["another image there"]["hashes"]
    assert one[0] == other[0], "the block before the image is shared"
    assert one[1:] != other[1:]


@given(ids=token_ids, block_tokens=st.integers(1, 8))
def test_only_full_blocks_have_a_hash(ids: list[int], block_tokens: int) -> None:
    hashes = derive_block_hashes(ids, root=ROOT, block_tokens=block_tokens)
    assert len(hashes) == len(ids) // block_tokens
    assert {len(block_hash) for block_hash in hashes} <= {HASH_BYTES}


@given(ids=token_ids, more=token_ids, block_tokens=st.integers(1, 8))
def test_what_follows_a_block_does_not_change_its_hash(ids: list[int], more: list[int], block_tokens: int) -> None:
    alone = derive_block_hashes(ids, root=ROOT, block_tokens=block_tokens)
    assert derive_block_hashes(ids + more, root=ROOT, block_tokens=block_tokens)[: len(alone)] == alone


@given(ids=st.lists(st.integers(0, 1000), min_size=12, max_size=12), at=st.integers(0, 11))
def test_one_other_token_changes_its_block_and_all_after_it_and_none_before(ids: list[int], at: int) -> None:
    before = derive_block_hashes(ids, root=ROOT, block_tokens=3)
    ids[at] += 1
    after = derive_block_hashes(ids, root=ROOT, block_tokens=3)
    assert [one == other for one, other in zip(before, after, strict=True)] == [depth < at // 3 for depth in range(4)]


def test_tokens_may_come_as_a_list_or_as_an_array_of_any_width() -> None:
    ids = list(range(100, 148))
    expected = derive_block_hashes(ids, root=ROOT, block_tokens=16)
    for dtype in (np.int32, np.uint32, np.int64):
        assert derive_block_hashes(np.array(ids, dtype=dtype), root=ROOT, block_tokens=16) == expected


@pytest.mark.parametrize("length", [0, NAMESPACE_BYTES - 1, NAMESPACE_BYTES + 1])
def test_a_namespace_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=str(NAMESPACE_BYTES)):
        chain_root(bytes(length), salt=b"")


@pytest.mark.parametrize("blocks", [0, 1, RUN_BLOCKS - 1, RUN_BLOCKS, RUN_BLOCKS + 1, 3 * RUN_BLOCKS + 2])
def test_keys_know_their_parent_their_depth_and_the_run_they_lie_in(blocks: int) -> None:
    hashes = derive_block_hashes(list(range(blocks)), root=ROOT, block_tokens=1)
    keys = block_keys(hashes, root=ROOT)
    assert [key.hash for key in keys] == hashes
    assert [key.depth for key in keys] == list(range(blocks))
    assert [key.parent for key in keys] == [ROOT, *hashes][:blocks]
    heads = [BlockHash(hashes[depth // RUN_BLOCKS * RUN_BLOCKS]) for depth in range(blocks)]
    assert [key.run for key in keys] == [head[:8] for head in heads]
