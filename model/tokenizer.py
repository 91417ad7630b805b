"""The checkpoint's `tokenizer.json`: text to ids without special tokens, ids to bytes, special ids.

Text of a user must never turn into a special token, however it is spelled: `encode` knows no added vocabulary. Chat
prompts, which do hold special tokens, are encoded by `prompt.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer as TokenizerFile

from whalepod.core.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """A byte-level BPE tokenizer. Immutable; its methods may be called from several threads."""

    def __init__(self, text: str) -> None:
        """`text`: the contents of a `tokenizer.json`. Raises CheckpointError if it is not one, or not byte-level."""
        try:
            values: dict[str, Any] = json.loads(text)
            self.file = TokenizerFile.from_str(text)
            plain = {**values, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._plain = TokenizerFile.from_str(json.dumps(plain))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"{TOKENIZER_FILE} cannot be read: {error}") from error
        if not _is_byte_level(values):
            raise CheckpointError(f"{TOKENIZER_FILE} is not byte-level: its decoder must be ByteLevel")
        self.json = text
        """What the prompt layer builds its own tokenizer from."""
        self.fingerprint = hashlib.sha256(text.encode()).digest()
        """32 bytes: prompts tokenized by other files must not share stored state."""
        self._bytes_by_id, self.special_ids = _token_bytes(self.file, values)
        self._token_bytes_max = max(map(len, self._bytes_by_id), default=0)
        self._normalizes = bool(values.get("normalizer"))

    @classmethod
    def from_dir(cls, directory: Path | str) -> Self:
        """From `tokenizer.json` in a checkpoint directory. Raises CheckpointError."""
        path = Path(directory) / TOKENIZER_FILE
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is missing or not UTF-8") from error

    @property
    def ids_end(self) -> int:
        """One past the largest id."""
        return len(self._bytes_by_id)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as plain text: no special token, none added in front."""
        # A batch, because only that lets other threads run meanwhile.
        return self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def tokens_at_least(self, text: str) -> int:
        """A number of tokens that no encoding of `text` can fall below: known at once, however long the text is."""
        if self._normalizes:  # which may shorten a text
            return 0
        return -(-len(text) // max(1, self._token_bytes_max))

    def token_id(self, spelling: str) -> int | None:
        """Id of the token spelled exactly so, None if there is none."""
        return self.file.token_to_id(spelling)

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text; may end inside a UTF-8 character. Empty for ids without a token."""
        return self._bytes_by_id[token_id] if 0 <= token_id < len(self._bytes_by_id) else b""


def _token_bytes(file: TokenizerFile, values: Mapping[str, Any]) -> tuple[list[bytes], frozenset[int]]:
    """The bytes of each id, and the ids that are special."""
    byte_of = _bytes_by_character()
    vocab = file.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for spelling, token_id in vocab.items():
        table[token_id] = bytes(byte_of[character] for character in spelling if character in byte_of)
    special: set[int] = set()
    for added in values.get("added_tokens") or []:
        table[added["id"]] = added["content"].encode()
        if added["special"]:
            special.add(added["id"])
    return table, frozenset(special)


def _bytes_by_character() -> dict[str, int]:
    """The byte that each character of a byte-level spelling stands for: printable Latin-1 bytes stand for themselves,
    the others, in order, for the characters from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(0x100 + offset): byte for offset, byte in enumerate(moved)}


def _is_byte_level(values: Mapping[str, Any]) -> bool:
    decoder = values.get("decoder") or {}
    return decoder.get("type") == "ByteLevel" or any(
        part.get("type") == "ByteLevel" for part in decoder.get("decoders", [])
    )
