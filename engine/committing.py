"""Tokens that were drawn become a request's own, one after another, up to its end.

Said ─▶ (grammar, finish rule) ─▶ tokens, and what ends the request
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from typing import cast

from whalepod.core.errors import ServingError
from whalepod.core.lifecycle import Phase

from .device import Drawn
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


def try_commit_all(
    sequence: Sequence, rows: int, drawn: Drawn | None, *, block_tokens: int
) -> tuple[SampledToken, ...] | None:
    """What a decoding request says in a step, taken all at once; None: each token is to be looked at. Nearly always
    there is no grammar, no token ends anything, and no row fills a block. `rows` were computed before the first one."""
    if drawn is None or not drawn.passes or sequence.phase is not Phase.DECODING:
        return None
    if sequence.grammar is not None or sequence.followers:
        return None
    computed = sequence.computed + rows + len(drawn.ids) - 1
    if computed // block_tokens != len(sequence.blocks_exact) or computed % block_tokens == 0:
        return None
    sequence.computed = computed
    sequence.extend(drawn.ids)
    return cast(tuple[SampledToken, ...], drawn.said)
