"""Reading a prompt of a million token ids without holding everybody else up.

A JSON parser holds the interpreter's lock until it is done: tenths of a second for a million numbers. Here the ids of
`"prompt"` are cut out of the body and read some at a time, straight into an array, by the parser that pydantic brings,
which takes a third of the standard one's time; the rest of the body is small.

    {"prompt":[1,2,…],"n":1} ─▶ {"prompt":"mark","n":1} ─▶ dict, in which the mark is replaced by the array
                    └─▶ 1,2,… ─▶ a few thousand at a time ─▶ array
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from whalepod.core.ids import mint_nonce

FIELD = "prompt"
OF_IDS = b"0123456789, \t\r\n"
"""What a list of ids is written with."""
PIECE_BYTES = 32 * 1024
"""About 5,000 ids: a fraction of a millisecond."""

# Within a string a quotation mark has a backslash before it, so this can only be a name (or a value, which the mark
# then shows: it is not where it should be).
_BEFORE_IDS = re.compile(rb'(?<!\\)"' + FIELD.encode() + rb'"\s*:\s*\[(?=\s*[0-9])')


def with_packed_ids(body: bytes) -> tuple[bytes, str, array[int]] | None:
    """The body with a mark in the place of the ids, the mark, and the ids (uint32). None: there are no such ids here,
    or something about them is wrong that an ordinary parser explains better."""
    before = _BEFORE_IDS.search(body)
    end = -1 if before is None else body.find(b"]", before.end())
    if before is None or end < 0:
        return None
    ids: array[int] = array("I")
    start = before.end()
    while start < end:
        cut = body.find(b",", start + PIECE_BYTES, end) if end - start > PIECE_BYTES else -1
        cut = end if cut < 0 else cut
        if not _take(ids, body[start:cut]):
            return None
        start = cut + 1
    if body[end - 1 : end] == b",":
        return None
    mark = mint_nonce().hex()
    return body[: before.end() - 1] + b'"' + mark.encode() + b'"' + body[end + 1 :], mark, ids


def put_ids(value: Mapping[str, Any], mark: str, ids: array[int]) -> dict[str, Any] | None:
    """`value` with the ids where the mark is. None: the mark is somewhere else."""
    return {**value, FIELD: ids} if value.get(FIELD) == mark else None


def _take(ids: array[int], piece: bytes) -> bool:
    if piece.translate(None, OF_IDS):
        return False
    try:
        ids.fromlist(from_json(b"[" + piece + b"]"))
    except (ValueError, OverflowError):
        return False
    return True
