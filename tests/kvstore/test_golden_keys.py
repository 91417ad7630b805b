"""Names derived here equal those of a second implementation in another language (`golden_keys/generate.mjs`)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from whalepod.core.block_keys import block_keys, chain_root, derive_block_hashes
from whalepod.kvstore.image_extras import ImageSpan, image_extras
from whalepod.kvstore.namespace import Namespace, canonical_encoding
from whalepod.kvstore.store_keys import block_store_key

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden_keys" / "vectors.json").read_text())["cases"]


def namespace(given: dict[str, Any]) -> Namespace:
    fields = dict(given, weights_fingerprint=bytes.fromhex(given["weights_fingerprint"]))
    for name in ("compress_ratios", "kv_sources", "index_sources"):
        fields[name] = tuple(fields[name])
    fields["rope"] = {
        name: float(value["real"]) if isinstance(value, dict) else value for name, value in given["rope"].items()
    }
    return Namespace(**fields)


def tokens(given: dict[str, int]) -> list[int]:
    return [(given["first"] + i * given["step"]) % given["vocabulary"] for i in range(given["count"])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_names_equal_the_other_implementations(case: dict[str, Any]) -> None:
    given, expected = case["given"], case["expected"]
    described = namespace(given["namespace"])
    block_tokens = described.block_tokens
    spans = [
        ImageSpan(bytes.fromhex(span["content_hash"]), span["start"], span["tokens"], span["processor_version"])
        for span in given["images"]
    ]

    root = chain_root(described.id, salt=bytes.fromhex(given["salt"]), adapter=given["adapter"].encode())
    hashes = derive_block_hashes(
        tokens(given["tokens"]),
        root=root,
        block_tokens=block_tokens,
        extras=image_extras(spans, block_tokens=block_tokens),
    )

    assert hashlib.sha256(canonical_encoding(described)).hexdigest() == expected["encoding_sha256"]
    assert described.id.hex() == expected["namespace"]
    assert root.hex() == expected["root"]
    assert [block_hash.hex() for block_hash in hashes] == expected["hashes"]
    keys = block_keys(hashes, root=root)
    assert [block_store_key(key).hex() for key in keys] == expected["store_keys"]


def test_only_the_same_prompt_shares_its_first_block() -> None:
    first = {case["name"]: case["expected"]["hashes"][0] for case in CASES if case["expected"]["hashes"]}
    times = Counter(first.values())
    assert {name for name, block_hash in first.items() if times[block_hash] > 1} == {"empty salt", "exactly one block"}
