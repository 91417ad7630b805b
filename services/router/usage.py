"""What a request cost, in the words of OpenAI and of DeepSeek."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens` is R: what of the prompt came from stored prefix, as the rank that ran it says."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    """None: the request has no reasoning."""

    def to_json(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }
        if self.reasoning_tokens is not None:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return fields


def total_usage(choices: Iterable[tuple[int, Usage]]) -> Usage:
    """Of all choices, given as (index of its prompt, usage): each prompt counts once, each completion too."""
    prompts: dict[int, Usage] = {}
    completion_tokens = 0
    reasoning: list[int] = []
    for prompt_index, usage in choices:
        prompts.setdefault(prompt_index, usage)
        completion_tokens += usage.completion_tokens
        if usage.reasoning_tokens is not None:
            reasoning.append(usage.reasoning_tokens)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts.values()),
        cached_tokens=sum(usage.cached_tokens for usage in prompts.values()),
        completion_tokens=completion_tokens,
        reasoning_tokens=sum(reasoning) if reasoning else None,
    )
