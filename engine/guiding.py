"""Requests that follow a grammar: compiled beside the engine, then one mask before each of their tokens is drawn.

submitted ──▶ begin ──▶ GrammarCompiler ──▶ GrammarReady ──▶ complete ──▶ (allowed ──▶ a token is drawn ──▶ accept), …

Meanwhile the request waits, and others are admitted before it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from concurrent.futures import Future
from dataclasses import dataclass

from whalepod.core.errors import InternalError, InvalidFieldError, ServingError
from whalepod.core.ids import RequestId

from .grammar.compiler import GrammarCompiler
from .grammar.errors import GrammarError
from .grammar.masks import Flags, allocate, unpack
from .grammar.matcher import CompiledGrammar
from .grammar.state import GrammarState
from .sequence import Sequence

FIELD = "grammar"
"""What an error of a grammar names, where the request's own field is not known."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """A request's grammar, or why there is none."""

    request_id: RequestId
    attempt: int
    grammar: CompiledGrammar | ServingError


class Guide:
    """Belongs to the engine's thread, except `deliver`, which the compiler's threads call."""

    def __init__(
        self,
        compiler: GrammarCompiler[CompiledGrammar],
        *,
        vocab_size: int,
        slots: int,
        deliver: Callable[[GrammarReady], None],
    ) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._masks = allocate(slots, vocab_size)
        """[slots, words] uint32, one row a slot."""
        self._deliver = deliver

    def begin(self, sequence: Sequence) -> None:
        """Have its grammar compiled, if it has one. Raises CapacityError."""
        request = sequence.request
        if request.sampling.grammar is None:
            return
        future = self._compiler.compile(request.sampling.grammar)
        sequence.compiling = True
        future.add_done_callback(
            lambda done: self._deliver(GrammarReady(request.request_id, request.attempt, _outcome(done)))
        )

    def complete(self, sequence: Sequence, ready: GrammarReady) -> None:
        """Put it where its tokens so far lead. Raises ServingError."""
        sequence.compiling = False
        if isinstance(ready.grammar, ServingError):
            raise ready.grammar
        state = GrammarState(ready.grammar, starts_after=sequence.request.sampling.grammar_starts_after)
        try:
            state.replay(sequence.output_ids)
        except GrammarError as error:
            raise _refused(error) from error
        sequence.grammar = state

    def follow(self, sequence: Sequence, token_id: int) -> None:
        """Move on by a token that was drawn elsewhere. Raises ServingError if it may not follow."""
        if sequence.grammar is None:
            return  # none, or not yet compiled: then `complete` will find the token among the others
        try:
            sequence.grammar.replay([token_id])
        except GrammarError as error:
            raise _refused(error) from error

    def allowed(self, sequence: Sequence, drafts: Ordered[int] = ()) -> list[Flags | ServingError]:
        """[vocab] bool: what may follow a sequence that holds a slot, at least one token; then what may follow each
        draft, as far as they may be said at all and do not end it. An error where the grammar has no way on.

        Where it stands does not change.
        """
        state, followed = sequence.grammar, 0
        assert state is not None
        assert sequence.slot is not None
        mask, rows = self._masks[sequence.slot.index], list[Flags | ServingError]()
        try:
            for draft in (*drafts, None):
                state.fill(mask)
                rows.append(unpack(mask, self._vocab_size))
                if draft is None or not state.accept(draft):
                    break
                followed += 1
                if state.ended:
                    break
            state.rollback(followed)
        except GrammarError as error:
            rows.append(_refused(error))
            if followed:
                self._rebuild(sequence, state)
        return rows

    def _rebuild(self, sequence: Sequence, state: GrammarState) -> None:
        """A matcher that has failed behind a draft is of no use, but the draft may fall."""
        rebuilt = state.restarted()
        rebuilt.replay(sequence.output_ids)
        sequence.grammar = rebuilt

    def accept(self, sequence: Sequence, token_id: int) -> None:
        """Move on by a token that was drawn among the allowed ones. Raises InvalidFieldError if the grammar fails."""
        if sequence.grammar is None:
            return
        try:
            accepted = sequence.grammar.accept(token_id)
        except GrammarError as error:
            raise _refused(error) from error
        assert accepted, f"token {token_id} was drawn against its mask"

    def close(self) -> None:
        """End what is being compiled."""
        self._compiler.close()


def _outcome(future: Future[CompiledGrammar]) -> CompiledGrammar | ServingError:
    if future.cancelled():
        return InternalError("the rank stopped before the grammar was compiled")
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, GrammarError):
        return _refused(error)
    return error if isinstance(error, ServingError) else InternalError("the grammar could not be compiled")


def _refused(error: GrammarError) -> InvalidFieldError:
    return InvalidFieldError(FIELD, f"{FIELD}: {error}")
