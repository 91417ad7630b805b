"""When a request ends (`runtime.md` §1.3). Asked once for every committed token, in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from whalepod.core.lifecycle import Outcome

from .interface import FinishReason
from .sampling_params import SamplingParams

OUTCOMES: Mapping[FinishReason, Outcome] = {
    FinishReason.STOP: Outcome.STOP,
    FinishReason.LENGTH: Outcome.LENGTH,
    FinishReason.ABORT: Outcome.ABORT,
    FinishReason.ERROR: Outcome.ERROR,
}


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    matched_stop_id: int | None = None
    """The entry of `stop_token_ids` that ended it; None for EOS and for lengths."""


@dataclass(frozen=True, slots=True)
class FinishRule:
    """What ends one request. A stop wins over a length that is reached with the same token."""

    params: SamplingParams
    prompt_tokens: int
    context_tokens_max: int
    eos_id: int
    output_tokens_max: int = field(init=False)
    tokens_max: int = field(init=False)
    """Prompt and output, when it surely has ended."""
    _ends: frozenset[int] = field(init=False)
    """Tokens that may end it."""

    def __post_init__(self) -> None:
        room, asked = self.context_tokens_max - self.prompt_tokens, self.params.max_tokens
        output_tokens_max = room if asked is None else min(asked, room)
        object.__setattr__(self, "output_tokens_max", output_tokens_max)
        object.__setattr__(self, "tokens_max", self.prompt_tokens + output_tokens_max)
        object.__setattr__(self, "_ends", frozenset((*self.params.stop_token_ids, self.eos_id)))

    def passes(self, token_ids: Collection[int], *, tokens: int) -> bool:
        """None of these tokens ends the request, whatever else holds for it; False: one may. `tokens` of prompt and
        output were there before."""
        return tokens + len(token_ids) < self.tokens_max and self._ends.isdisjoint(token_ids)

    def check(self, token_id: int, *, output_tokens: int) -> Finish | None:
        """`output_tokens` counts this token too. Under a grammar, EOS is drawn only where the answer is whole: there it
        ends the request whatever `min_tokens` says, because nothing else could follow."""
        if token_id == self.eos_id and self.params.grammar is not None:
            return Finish(FinishReason.STOP)
        if output_tokens >= self.params.min_tokens:
            if token_id == self.eos_id and not self.params.ignore_eos:
                return Finish(FinishReason.STOP)
            if token_id in self.params.stop_token_ids:
                return Finish(FinishReason.STOP, matched_stop_id=token_id)
        if output_tokens >= self.output_tokens_max:
            return Finish(FinishReason.LENGTH)
        return None
