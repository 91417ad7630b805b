"""Tokens that were drawn become a request's own, one after another, up to its end.

Said ─▶ (grammar, finish rule) ─▶ tokens, and what ends the request
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import cast

from whalepod.core.errors import ServingError

from .finish import Finish
from .guiding import Guide
from .interface import SampledToken
from .publishing import Publisher
from .sequence import Sequence
from .speculation.acceptance import Said

End = Finish | ServingError | None


def judge(sequence: Sequence, token: SampledToken, guide: Guide, *, output_tokens: int) -> End:
    """What the next token of a request brings to an end. `output_tokens` counts it."""
    if sequence.grammar is not None:
        try:
            guide.accept(sequence, token.id)
        except ServingError as error:
            return error
    return sequence.finish_rule.check(token.id, output_tokens=output_tokens)


def commit_tokens(
    sequence: Sequence, said: Said, *, guide: Guide, publisher: Publisher
) -> tuple[Ordered[SampledToken], End]:
    """The tokens that a request now has, and what ends it. What was drawn behind the end is dropped."""
    if (drawn := _try_all(sequence, said, publisher.block_tokens)) is not None:
        return drawn, None
    before, tokens = sequence.output_tokens, list[SampledToken]()
    for token in said:
        if tokens:  # whose row is computed
            sequence.computed += 1
            publisher.commit_rows(sequence)
        if isinstance(token, ServingError):
            return tokens, token
        end = judge(sequence, token, guide, output_tokens=before + len(tokens) + 1)
        if isinstance(end, ServingError):
            return tokens, end
        sequence.extend((token.id,))
        tokens.append(token)
        if end is not None:
            return tokens, end
    return tokens, None


def _try_all(sequence: Sequence, said: Said, block_tokens: int) -> Ordered[SampledToken] | None:
    """Take all of them at once if they end nothing and the rows of all but the last fill no block, as nearly always."""
    rows = len(said) - 1
    if sequence.grammar is not None or sequence.computed % block_tokens + rows >= block_tokens:
        return None
    if isinstance(said[-1], ServingError):  # if any is, the last is
        return None
    drawn = cast(tuple[SampledToken, ...], said)
    token_ids = [token.id for token in drawn]
    if not sequence.finish_rule.passes(token_ids, output_tokens=sequence.output_tokens):
        return None
    sequence.computed += rows
    sequence.extend(token_ids)
    return drawn
