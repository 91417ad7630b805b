"""Tokens that were drawn become a request's own, one after another, up to its end.

Said ─▶ (grammar, finish rule) ─▶ tokens, and what ends the request
"""

from __future__ import annotations

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
) -> tuple[list[SampledToken], End]:
    """The tokens that a request now has, and what ends it. What was drawn behind the end is dropped."""
    before, tokens = sequence.output_tokens, list[SampledToken]()
    for count, token in enumerate(said, 1):
        if tokens:  # whose row is computed
            sequence.computed += 1
            publisher.commit_rows(sequence)
        if isinstance(token, ServingError):
            return tokens, token
        end = judge(sequence, token, guide, output_tokens=before + count)
        if isinstance(end, ServingError):
            return tokens, end
        sequence.append(token.id)
        tokens.append(token)
        if end is not None:
            return tokens, end
    return tokens, None
