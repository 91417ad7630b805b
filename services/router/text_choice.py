"""One choice of a completion: a job's tokens as text, cut at stop strings.

The text of all deltas together is the same however the tokens were bundled, so a streamed answer equals the other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

from whalepod.engine.interface import FinishReason, SampledToken
from whalepod.engine.sampling_params import SamplingParams
from whalepod.model.detokenizer import Detokenizer

from .front_door import Caller, FrontDoor
from .job import Burst, Ending, Job, Progress, Route, Scores
from .relay import Relay


@dataclass(frozen=True, slots=True)
class TextOptions:
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True


class TextDelta(NamedTuple):
    """What one step added. `text` may be empty, or hold text of earlier tokens that had to wait."""

    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TextScores:
    """Log-probabilities of the prompt's tokens from position `start` on, as `job.Scores` has them."""

    start: int
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class TextEnd:
    """`reason` is STOP or LENGTH; `stop_reason` the stop string or stop id that matched."""

    reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    route: Route | None


TextEvent = TextDelta | TextScores | TextEnd


async def stream_text(
    front: FrontDoor, job: Job, caller: Caller, options: TextOptions, relay: Relay[TextDelta] | None = None
) -> AsyncGenerator[TextEvent, None]:
    """Scores of the prompt if they were asked for, deltas, one end. A stop string stops the ranks at once. `relay` is
    given deltas as `Dispatcher.generate` says; with stop strings none, because one ends the stream.

    Raises what `Dispatcher.generate` raises.
    """
    text = _Text(front, job, options)
    delta = TextDelta("", ())
    item: Progress | None = None
    bursts = None if relay is None or options.stop else relay.through(text.push)
    async with aclosing(front.run(job, caller, bursts)) as progress:
        async for item in progress:
            if isinstance(item, Scores):
                yield TextScores(item.start, item.tokens)
                continue
            if isinstance(item, Ending):
                delta = TextDelta(text.finish(), ())
                break
            delta = text.push(item)
            if text.stop_matched is not None:
                break
            yield delta
    # The ranks have been told; only now is a client, who may be slow, given the last of it.
    assert item is not None, "a job yields at least its ending"
    if delta.text or delta.tokens:
        yield delta
    yield _end(job, item, text.stop_matched, completion_tokens=text.tokens)


class _Text:
    """What a job has said so far, and how many tokens that took."""

    def __init__(self, front: FrontDoor, job: Job, options: TextOptions) -> None:
        self.tokens = 0
        self._text = Detokenizer(
            front.language.tokenizer,
            stop=options.stop,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
        )
        self._enders = silent_enders(
            job.sampling, eos_token_id=front.language.eos_token_id, include_stop=options.include_stop
        )

    @property
    def stop_matched(self) -> str | None:
        return self._text.stop_matched

    def push(self, burst: Burst) -> TextDelta:
        """New text, and the tokens that came before a stop string or completed it."""
        tokens = burst.tokens
        new, taken = _push(self._text, tokens, self._enders)
        self.tokens += taken
        return TextDelta(new, tokens[:taken])

    def finish(self) -> str:
        return self._text.finish()


def silent_enders(sampling: SamplingParams, *, eos_token_id: int, include_stop: bool) -> frozenset[int]:
    """Ids that end a request where they appear and are no part of its text."""
    stop_ids = frozenset[int]() if include_stop else frozenset(sampling.stop_token_ids)
    return stop_ids if sampling.ignore_eos else stop_ids | {eos_token_id}


def _push(text: Detokenizer, tokens: Sequence[SampledToken], enders: frozenset[int]) -> tuple[str, int]:
    """New text, and how many of the tokens came before or completed a stop string."""
    if len(tokens) == 1:
        token_id = tokens[0].id
        return "" if token_id in enders else text.push((token_id,)), 1
    pieces: list[str] = []
    for index, token in enumerate(tokens):
        if token.id not in enders:
            pieces.append(text.push((token.id,)))
        if text.stop_matched is not None:
            return "".join(pieces), index + 1
    return "".join(pieces), len(tokens)


def _end(job: Job, last: Progress, stop_matched: str | None, *, completion_tokens: int) -> TextEnd:
    """A stop string wins over whatever the engine stopped for in the same step."""
    reason, stop_reason = FinishReason.STOP, stop_matched
    if stop_matched is None:
        assert isinstance(last, Ending), "without a stop string only an ending ends a job"
        reason, stop_reason = last.reason, last.matched_stop_id
    return TextEnd(
        reason=reason,
        stop_reason=stop_reason,
        prompt_tokens=len(job.prompt_ids),
        cached_tokens=last.cached_tokens,
        completion_tokens=completion_tokens,
        route=last.route,
    )
