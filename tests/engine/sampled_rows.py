"""Requests with every kind of sampling, and what their rows must get wherever they are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from whalepod.engine.device_sampling import Group, draw_groups
from whalepod.engine.interface import SampledToken
from whalepod.engine.sampling import DrawRow, Sampler, draw_rows
from whalepod.engine.sampling_params import SamplingParams

VOCAB = 203


def random_params(generator: np.random.Generator, vocab: int) -> SamplingParams:
    def sometimes(value: float, otherwise: float) -> float:
        return value if generator.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=sometimes(float(generator.choice([0, 1e-5, 0.01, 0.7, 2])), 1.0),
        top_k=int(sometimes(int(generator.integers(1, 40)), -1)),
        top_p=sometimes(float(generator.choice([1e-9, 0.5, 0.95])), 1.0),
        min_p=sometimes(float(generator.choice([0.01, 0.2, 1])), 0.0),
        min_tokens=int(sometimes(9, 0)),
        stop_token_ids=(2,),
        repetition_penalty=sometimes(1.3, 1.0),
        frequency_penalty=sometimes(0.4, 0.0),
        presence_penalty=sometimes(-0.3, 0.0),
        logit_bias={5: 3.5, vocab - 1: -100.0} if generator.random() < 0.4 else {},
        allowed_token_ids=tuple(range(3, vocab, 2 + vocab // 16384)) if generator.random() < 0.2 else None,
        bad_word_ids=((5,), (7, 8), (0, 9, 2)) if generator.random() < 0.4 else (),
        logprobs=int(generator.choice([0, 1, 5])) if generator.random() < 0.5 else None,
    )


def random_groups(
    seed: int, *, requests: int, vocab: int = VOCAB, device: str = "cpu", spread: float = 2
) -> list[Group]:
    """Of 1 to 3 rows each; half of the logits tie with others."""
    generator = np.random.default_rng(seed)
    groups: list[Group] = []
    for request in range(requests):
        params, prompt = random_params(generator, vocab), generator.integers(0, vocab, 9).tolist()
        sampler = Sampler(
            params, key=int(generator.integers(2**63)), eos_id=1, prompt_ids=prompt, output_ids=prompt[:4]
        )
        drafts = generator.integers(0, vocab, generator.integers(3)).tolist()
        if params.bad_word_ids:
            drafts = [7, 8][: len(drafts)]
        allowed = generator.random(vocab) < 0.1 if generator.random() < 0.3 else None
        logits = generator.standard_normal((1 + len(drafts), vocab), np.float32) * np.float32(spread)
        if request % 2:
            logits = (logits * 4).round() / 4
        rows = [
            DrawRow(sampler, 13 + place, drafts=drafts[:place], allowed=allowed) for place in range(1 + len(drafts))
        ]
        groups.append(Group(torch.from_numpy(logits).to(device), rows))
    return groups


def assert_drawn_as_on_the_host(groups: Sequence[Group]) -> None:
    """Ids are equal, log-probabilities within two last bits of a float32."""
    before = [group.logits.clone() for group in groups]
    for group, tokens, unchanged in zip(groups, draw_groups(groups), before, strict=True):
        assert torch.equal(group.logits, unchanged)
        wanted = draw_rows(group.logits.cpu().numpy(), group.rows)
        for token, right in zip(tokens, wanted, strict=True):
            assert isinstance(token, SampledToken) and isinstance(right, SampledToken)
            assert (token.id, token.top_ids) == (right.id, right.top_ids), group.rows[0].sampler.params
            assert (token.logprob is None) == (right.logprob is None)
            if right.logprob is not None and token.logprob is not None:
                np.testing.assert_allclose(
                    [token.logprob, *token.top_logprobs], [right.logprob, *right.top_logprobs], rtol=3e-7, atol=1e-12
                )
