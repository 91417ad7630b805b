"""A grammar that was compiled, and one place in it.

The end of the sequence is ours: llguidance neither counts nor rolls it back when nothing else can follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from whalepod.core.clock import thread_cpu_s

from .errors import DeadEndError, GrammarError
from .masks import MaskWords
from .spec import GrammarKind, GrammarSpec
from .vocabulary import Vocabulary

TOKEN_CPU_S = 0.01
"""What following a grammar may cost for each token, on the average. Usual are 20–500 µs."""
CREDIT_CPU_S_MAX = 0.25
"""What it may have saved up for its worst ones."""
REASON_CHARS_MAX = 400

# In llguidance's units. Against its own: fewer states, because one takes 1–2 kB, and smaller grammars.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class CompiledGrammar:
    """Ready to be followed by any number of requests. Immutable."""

    def __init__(self, spec: GrammarSpec, lowered: str, vocabulary: Vocabulary) -> None:
        """`lowered`: the spec in llguidance's words. Takes milliseconds, or for ever; releases the interpreter's lock
        meanwhile. Raises GrammarError."""
        self.vocabulary = vocabulary
        self.spoken_words = vocabulary.text_words
        """[words] uint32: the tokens that it may speak, apart from the end of the sequence."""
        marker_id = vocabulary.call_marker_id
        if spec.kind is GrammarKind.TOOL_CALLS and marker_id is not None:
            self.spoken_words = self.spoken_words.copy()
            self.spoken_words[marker_id // 32] |= np.uint32(1 << marker_id % 32)
        self._start = LLMatcher(vocabulary.llguidance, lowered, log_level=0, limits=_LIMITS)
        if self._start.is_error():
            raise _error_of(self._start)

    def matcher(self) -> Matcher:
        """At the beginning."""
        return Matcher(self._start.deep_copy(), self)


@dataclass(slots=True)
class Matcher:
    """Belongs to one thread. Its place is a function of the accepted tokens.

    `fill` and `accept` raise GrammarError when there is no way on or a limit is exceeded; after that it is of no use.
    """

    _inner: LLMatcher
    _grammar: CompiledGrammar
    _ended: bool = False
    _credit_s: float = CREDIT_CPU_S_MAX

    @property
    def ended(self) -> bool:
        """The end-of-sequence token was accepted."""
        return self._ended

    @property
    def accepting(self) -> bool:
        """What was accepted is a whole sentence of the grammar."""
        return self._ended or self._inner.is_accepting()

    def fill(self, mask: MaskWords) -> None:
        """Write the tokens that may follow to `mask` [words] uint32; the end must not have been accepted.

        The end-of-sequence token is among them exactly if the sentence is whole. Raises DeadEndError if there are none.
        """
        assert not self._ended
        started_s = thread_cpu_s()
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check(started_s)
        mask &= self._grammar.spoken_words
        if self._inner.is_accepting():
            mask[self._grammar.vocabulary.eos_id // 32] |= np.uint32(1 << self._grammar.vocabulary.eos_id % 32)
        if not mask.any():
            raise DeadEndError

    def accept(self, token_id: int) -> bool:
        """Move on by one token. False, and no move, if it may not follow."""
        if self._ended:
            return False
        if token_id == self._grammar.vocabulary.eos_id:
            self._ended = self._inner.is_accepting()
            return self._ended
        if not self._may_speak(token_id):
            return False
        self._credit_s = min(CREDIT_CPU_S_MAX, self._credit_s + TOKEN_CPU_S)
        started_s = thread_cpu_s()
        accepted = self._inner.try_consume_tokens([token_id]) == 1
        self._check(started_s)
        return accepted

    def accept_all(self, token_ids: Sequence[int]) -> int:
        """Move on as far as the tokens may follow; how many did."""
        for count, token_id in enumerate(token_ids):
            if not self.accept(token_id):
                return count
        return len(token_ids)

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens; there must be as many."""
        if count and self._ended:
            self._ended, count = False, count - 1
        if count:
            assert self._inner.rollback(count), self._inner.get_error()

    def fork(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._inner.deep_copy(), self._grammar, self._ended, self._credit_s)

    def _may_speak(self, token_id: int) -> bool:
        if not 0 <= token_id < self._grammar.vocabulary.size:
            return False
        word = self._grammar.spoken_words[token_id // 32]
        return bool(word >> np.uint32(token_id % 32) & np.uint32(1))

    def _check(self, started_s: float) -> None:
        if self._inner.is_error():
            raise _error_of(self._inner)
        self._credit_s -= thread_cpu_s() - started_s
        if self._credit_s < 0:
            raise GrammarError("following this grammar takes too long")


def _error_of(matcher: LLMatcher) -> GrammarError:
    """llguidance's message without its drawings of the grammar, which are indented."""
    error = matcher.get_error()
    if error.startswith("NoExtension"):
        return DeadEndError()
    lines = [line.strip() for line in error.splitlines() if line.strip() and line[0] not in " <"]
    return GrammarError(" ".join(lines)[:REASON_CHARS_MAX])
