"""Prompts that are likely to show a difference between a cluster and a single process. Pure; one seed, same cases.

Half of them are several blocks long. The others end where something changes: around multiples of the block B, the kept
rows K, the window W and a chunk, and where the boundary of an `encoder` hand-off crosses a block border.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

from whalepod.engine.sampling_params import SamplingParams

ANSWER_TOKENS = (8, 24)
NEXT_TURN_TOKENS = 6
FIRST_ORDINARY_ID = 3
"""Below it are begin, end and padding."""


class Warmth(Enum):
    COLD = "cold"
    TURN = "turn"  # the conversation so far, and a few tokens more: a turn snapshot is near
    PREFIX = "prefix"  # another prompt's first blocks: no snapshot there, the halo is replayed


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths, in tokens, at which the served model's behaviour changes."""

    block_tokens: int
    kept_rows: int
    window: int
    chunk_tokens: int
    group_tokens: int
    context_tokens_max: int
    vocabulary: int
    never_ids: frozenset[int]
    """Ids that a text prompt does not hold."""


@dataclass(frozen=True, slots=True)
class CanaryCase:
    """One request. `primer` is sent first and under the same salt, if the case is warm."""

    index: int
    warmth: Warmth
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    primer: tuple[int, ...] = ()


def plan_cases(shape: Shape, *, count: int, warm: bool, seed: int = 0) -> list[CanaryCase]:
    """`count` cases; greedy and seeded ones take turns. Every other one is several blocks long."""
    rng = Random(seed)
    borders = list(border_lengths(shape))
    rng.shuffle(borders)
    cases: list[CanaryCase] = []
    for index in range(count):
        warmth = (Warmth.TURN, Warmth.PREFIX)[index // 2 % 2] if warm else Warmth.COLD
        long = warm or index % 2 == 0
        length = _long_length(shape, rng) if long else borders[index // 2 % len(borders)]
        cases.append(_case(shape, rng, index, warmth, length))
    return cases


def border_lengths(shape: Shape) -> Iterator[int]:
    """Prompt lengths around every border, each once."""
    b, k, w, r = shape.block_tokens, shape.kept_rows, shape.window, shape.group_tokens
    marks = {r, w, k, k + w, b, 2 * b, 3 * b, b + k, 2 * b + k, 2 * b + w, shape.chunk_tokens, shape.chunk_tokens + k}
    lengths = {mark + step for mark in marks for step in (-1, 0, 1)} | {1, 2}
    yield from sorted(length for length in lengths if 1 <= length <= shape.context_tokens_max - ANSWER_TOKENS[1])


def _long_length(shape: Shape, rng: Random) -> int:
    longest = min(7 * shape.block_tokens, shape.context_tokens_max - ANSWER_TOKENS[1] - NEXT_TURN_TOKENS)
    return rng.randint(min(3 * shape.block_tokens, longest), longest)


def _case(shape: Shape, rng: Random, index: int, warmth: Warmth, length: int) -> CanaryCase:
    prompt = _ids(shape, rng, length)
    primer: tuple[int, ...] = ()
    if warmth is Warmth.TURN:
        primer, prompt = prompt, (*prompt, *_ids(shape, rng, NEXT_TURN_TOKENS))
    elif warmth is Warmth.PREFIX:
        shared = shape.block_tokens * rng.randint(1, max(1, (length - shape.kept_rows) // shape.block_tokens))
        primer = (*prompt[:shared], *_ids(shape, rng, 2 * shape.block_tokens + shape.kept_rows))
    greedy = index // 2 % 2 == 0
    sampling = SamplingParams(
        temperature=0.0 if greedy else 1.0,
        seed=None if greedy else rng.randrange(2**31),
        max_tokens=rng.randint(*ANSWER_TOKENS),
        ignore_eos=index % 4 != 0,
        logprobs=0,
    )
    return CanaryCase(index, warmth, prompt, sampling, primer)


def _ids(shape: Shape, rng: Random, count: int) -> tuple[int, ...]:
    allowed: Sequence[int] = [
        token_id for token_id in range(FIRST_ORDINARY_ID, shape.vocabulary) if token_id not in shape.never_ids
    ]
    return tuple(rng.choices(allowed, k=count))
