"""Turns generated ids into text while they arrive. Whatever the chunks, the concatenated text is the same.

Text is held back while it could still change: bytes of an unfinished UTF-8 character, and an ending that may grow
into a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer


class Detokenizer:
    """One choice of one `/v1/completions` request. Bytes that are no UTF-8 become U+FFFD."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`stop`: non-empty strings; the text ends before the one that is completed first, of those the longest, or
        behind it with `include_stop`."""
        assert all(stop), "an empty stop string would match everywhere"
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stop_matched: str | None = None
        """The stop string that ended the text. Further ids add nothing."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is certain now and was not before."""
        if self.stop_matched is not None:
            return ""
        data = b"".join(self._tokenizer.token_bytes(token_id) for token_id in token_ids if token_id not in self._skip)
        return self._advance(self._decoder.decode(data), last=False)

    def finish(self) -> str:
        """The rest, when no ids follow. An unfinished character becomes U+FFFD."""
        if self.stop_matched is not None:
            return ""
        return self._advance(self._decoder.decode(b"", final=True), last=True)

    def _advance(self, new: str, *, last: bool) -> str:
        if not self._stop:
            return new
        text = self._held + new
        match = self._first_stop(text)
        if match is not None:
            end, self.stop_matched = match
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stop_matched)]
        held = 0 if last else self._ending_held(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """(end, stop string) of the match that is completed first. Reading by character finds the same one."""
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _ending_held(self, text: str) -> int:
        """Length of the longest ending of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
