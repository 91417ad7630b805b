"""What came of the prompts of `LLM.generate`, while it comes and when it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from whalepod.core.errors import ServingError
from whalepod.core.ids import RequestId
from whalepod.model.detokenizer import Detokenizer

from .interface import FinishReason, SampledToken
from .sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `text` ends at its first stop string; `tokens` are those that were drawn up to there."""

    tokens: tuple[SampledToken, ...]
    text: str
    finish_reason: FinishReason
    matched_stop: str | int | None = None
    """The stop string or the entry of `stop_token_ids` that ended it."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of one prompt. With an `error`, its outputs are what had been generated before."""

    prompt_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """One for each of the `n` choices."""
    error: ServingError | None = None
    prompt_logprobs: tuple[SampledToken | None, ...] | None = None
    """If they were asked for: of each token of the prompt; None for the first, which follows nothing."""

    @property
    def output(self) -> CompletionOutput:
        """The first choice."""
        return self.outputs[0]


@dataclass(slots=True)
class Choice:
    """One choice of one prompt while it is generated."""

    request_id: RequestId
    text: Detokenizer
    silent_ids: frozenset[int]
    """Ends of the sequence, which are no part of its text."""
    tokens: list[SampledToken] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    reason: FinishReason | None = None
    matched_stop: str | int | None = None
    error: ServingError | None = None

    @property
    def ended(self) -> bool:
        return self.reason is not None

    def take(self, tokens: Sequence[SampledToken]) -> None:
        """Tokens were drawn. They end it if they complete a stop string."""
        for token in tokens:
            self.tokens.append(token)
            if token.id not in self.silent_ids:
                self.pieces.append(self.text.push((token.id,)))
            if self.text.stop_matched is not None:
                self.end(FinishReason.STOP, self.text.stop_matched)
                return

    def end(
        self, reason: FinishReason, matched_stop: str | int | None = None, error: ServingError | None = None
    ) -> None:
        """Nothing follows. Text that was held back may yet turn out to be a stop string's."""
        self.pieces.append(self.text.finish())
        self.reason, self.matched_stop, self.error = reason, matched_stop, error

    def output(self) -> CompletionOutput:
        reason = FinishReason.ERROR if self.reason is None else self.reason
        return CompletionOutput(tuple(self.tokens), "".join(self.pieces), reason, self.matched_stop)


def silent_ids(sampling: SamplingParams, *, eos_id: int) -> frozenset[int]:
    """Ids that end a request where they appear and are no part of its text."""
    stop_ids = frozenset[int]() if sampling.include_stop_str_in_output else frozenset(sampling.stop_token_ids)
    return stop_ids if sampling.ignore_eos else stop_ids | {eos_id}
