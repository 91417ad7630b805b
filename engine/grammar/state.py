"""Where one request stands: before its grammar begins, in it, or past its end.

    waiting for `starts_after` ──that token──▶ following the grammar ──end of sequence──▶ ended

A function of the generated tokens alone, so it can be built anew from them wherever the request goes on.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .errors import GrammarError
from .masks import MaskWords
from .matcher import CompiledGrammar


class GrammarState:
    """Belongs to one thread."""

    def __init__(self, grammar: CompiledGrammar, *, starts_after: int | None = None) -> None:
        """`starts_after`: the token that ends the model's reasoning; the answer after it is what the grammar governs.
        None: it governs the first token."""
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._matcher = grammar.matcher()
        self._starts_after = starts_after
        self._accepted_before = 0
        """Tokens up to and with `starts_after`."""
        self._accepted_inside = 0
        self._started = starts_after is None

    def restarted(self) -> GrammarState:
        """Another one, before its first token."""
        return GrammarState(self._grammar, starts_after=self._starts_after)

    @property
    def started(self) -> bool:
        return self._started

    @property
    def ended(self) -> bool:
        return self._matcher.ended

    @property
    def accepting(self) -> bool:
        """If the answer ended here, it would be whole."""
        return self._started and self._matcher.accepting

    def fill(self, mask: MaskWords) -> None:
        """Write what may follow to `mask` [words] uint32.

        Reasoning is free, but cannot end the sequence: an answer was promised after it. Raises GrammarError if there is
        no way on.
        """
        if self._started:
            self._matcher.fill(mask)
            return
        mask[:] = 0xFFFFFFFF
        eos_id = self._vocabulary.eos_id
        mask[eos_id // 32] &= np.uint32(0xFFFFFFFF ^ 1 << eos_id % 32)

    def accept(self, token_id: int) -> bool:
        """Move on by one token. False, and no move, if it may not follow."""
        if self._started:
            accepted = self._matcher.accept(token_id)
            self._accepted_inside += accepted
            return accepted
        if token_id == self._vocabulary.eos_id:
            return False
        self._accepted_before += 1
        self._started = token_id == self._starts_after
        return True

    def replay(self, token_ids: Iterable[int]) -> None:
        """Move on by tokens that were generated elsewhere. Raises GrammarError if they cannot be a beginning."""
        for token_id in token_ids:
            if not self.accept(token_id):
                raise GrammarError("the tokens generated so far do not follow the grammar")

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens; there must be as many."""
        inside = min(count, self._accepted_inside)
        self._matcher.rollback(inside)
        self._accepted_inside -= inside
        before = count - inside
        assert before <= self._accepted_before, "more tokens are taken back than were accepted"
        self._accepted_before -= before
        if before:
            self._started = False
