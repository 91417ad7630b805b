"""A model that says anything: logits of one seed, then grammar mask, then greedy or a draw at temperature 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from whalepod.engine.grammar.masks import allocate, forbid
from whalepod.engine.grammar.matcher import CompiledGrammar
from whalepod.engine.grammar.state import GrammarState
from whalepod.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """`ids` without the end-of-sequence token."""

    stopped: bool
    ids: list[int]
    state: GrammarState

    def text(self, tokenizer: Tokenizer) -> str:
        return b"".join(tokenizer.token_bytes(token_id) for token_id in self.ids).decode()


def answer(
    grammar: CompiledGrammar, *, seed: int, greedy: bool, max_tokens: int = 400, begun: GrammarState | None = None
) -> Answer:
    """What the model says, to its end or to `max_tokens`; `begun`: after what was said already. Raises GrammarError."""
    vocab_size = grammar.vocabulary.size
    draws = np.random.default_rng(seed)
    state = GrammarState(grammar) if begun is None else begun
    mask = allocate(1, vocab_size)
    ids: list[int] = []
    while len(ids) < max_tokens:
        state.fill(mask[0])
        logits = draws.standard_normal((1, vocab_size), dtype=np.float32)
        forbid(logits, mask)
        if not greedy:
            logits += draws.gumbel(size=logits.shape).astype(np.float32)
        token_id = int(np.argmax(logits))
        assert state.accept(token_id), token_id
        if state.ended:
            return Answer(True, ids, state)
        ids.append(token_id)
    return Answer(False, ids, state)
