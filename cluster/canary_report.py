"""What a canary found: answers, and where they differ from the oracle's."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from whalepod.engine.interface import SampledToken


@dataclass(frozen=True, slots=True)
class Answer:
    """`logprob_bits[i]` is the float32 log-probability of token i, as its 4 bytes."""

    token_ids: tuple[int, ...]
    logprob_bits: tuple[bytes, ...]
    prefill_rank: str = ""
    cached_tokens: int = 0


@dataclass(slots=True)
class CanaryReport:
    """What was found. The names are the figures that `whalepod canary` prints."""

    requests: int = 0
    handed_off: int = 0
    different: int = 0
    logprob_different: int = 0
    control_seen: bool = False
    cached: int = 0
    failed: int = 0
    first_difference: str | None = None
    errors: list[str] = field(default_factory=list)

    def figures(self) -> Mapping[str, object]:
        return asdict(self)


def note_difference(label: str, answer: Answer, truth: Answer, report: CanaryReport) -> None:
    """Count one answer's differences; the first is told. `label`: which answer it is."""
    if answer.token_ids != truth.token_ids:
        report.different += 1
        what = f"tokens {answer.token_ids} instead of {truth.token_ids}"
    elif answer.logprob_bits != truth.logprob_bits:
        report.logprob_different += 1
        what = _logprob_difference(answer.logprob_bits, truth.logprob_bits)
    else:
        return
    if report.first_difference is None:
        report.first_difference = f"{label}: {what}"


def answer_of_tokens(tokens: Sequence[SampledToken]) -> Answer:
    return Answer(
        token_ids=tuple(token.id for token in tokens),
        logprob_bits=tuple(struct.pack("<f", token.logprob) for token in tokens if token.logprob is not None),
    )


def _logprob_difference(ours: Sequence[bytes], theirs: Sequence[bytes]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} log-probabilities instead of {len(theirs)}"
    at = next(index for index in range(len(ours)) if ours[index] != theirs[index])
    return f"log-probability of token {at} is {_float(ours[at])!r} instead of {_float(theirs[at])!r}"


def _float(bits: bytes) -> float:
    return struct.unpack("<f", bits)[0]
