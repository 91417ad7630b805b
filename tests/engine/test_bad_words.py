"""Masks that a request brings: `allowed_token_ids` and `bad_words`, alone, with each other and with what else masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch

from tests.engine.engine_world import CHECKPOINT, GREEDY, OPTIONS, SEEDED, Heard, World, oracle, prompt_of, tiny_model
from whalepod.core.errors import InvalidFieldError
from whalepod.engine.bad_words import BadWords, encode_bad_words
from whalepod.engine.device_sampling import Group, draw_groups
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import Fidelity, FinishReason, SampledToken
from whalepod.engine.llm import LLM
from whalepod.engine.sampling import DrawRow, Sampler, draw_rows, process_rows
from whalepod.engine.sampling_params import SamplingParams
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.engine.speculation.statistics import add_up

EOS = 1
LONG = replace(GREEDY, max_tokens=16, logprobs=None)
DRAFTING = SpeculationOptions(draft_tokens=4)
"""Requests that are exact or seeded by coupling, others by rejection."""


def _occurs(word: Sequence[int], ids: Sequence[int]) -> bool:
    return any(tuple(ids[at : at + len(word)]) == tuple(word) for at in range(len(ids)))


def _row(params: SamplingParams, *, outputs: Sequence[int] = (), drafts: Sequence[int] = ()) -> DrawRow:
    return DrawRow(Sampler(params, key=3, eos_id=EOS, prompt_ids=(2, 3), output_ids=outputs), 9, drafts)


def _forbidden(params: SamplingParams, **known: Sequence[int]) -> list[int]:
    """Of six equal tokens."""
    return np.flatnonzero(process_rows(np.zeros((1, 6), np.float32), [_row(params, **known)])[0] == -np.inf).tolist()


def test_what_would_complete_a_word_is_found_after_every_history() -> None:
    rng = Random(1)
    for _ in range(200):
        words = [tuple(rng.randrange(3) for _ in range(rng.randrange(1, 5))) for _ in range(4)]
        ids = [rng.randrange(3) for _ in range(rng.randrange(9))]
        cut, draft_cut = sorted(rng.randrange(len(ids) + 1) for _ in range(2))
        state = BadWords(words, ids[:cut])
        for token_id in ids[cut:draft_cut]:
            state.observe(token_id)
        expected = [last for last in range(3) if any(tuple([*ids, last][-len(word) :]) == word for word in words)]
        assert state.next_ids(ids[draft_cut:]).tolist() == expected


def test_words_are_encoded_bare_and_after_a_space() -> None:
    def encode(text: str) -> list[int]:
        return list(text.encode())

    params = encode_bad_words(SamplingParams(bad_words=("ab", " ab", "\n"), bad_word_ids=((7,),)), encode)
    assert params.bad_words == ()
    assert params.bad_word_ids == ((7,), (97, 98), (32, 97, 98), (10,), (32, 10))
    with pytest.raises(InvalidFieldError, match="at most 64 tokens each, and 'aaaa") as caught:
        encode_bad_words(SamplingParams(bad_words=("a" * 65,)), encode)
    assert caught.value.field == "bad_words"


def test_only_allowed_tokens_keep_weight_whatever_their_bias() -> None:
    assert _forbidden(SamplingParams(allowed_token_ids=(4, 2), logit_bias={3: 100.0})) == [0, 1, 3, 5]
    penalized = SamplingParams(allowed_token_ids=(4, 2), presence_penalty=-2.0, repetition_penalty=0.5)
    assert _forbidden(penalized, outputs=[3, 0, 3]) == [0, 1, 3, 5]


def test_a_bad_word_may_begin_in_output_and_drafts_but_not_in_the_prompt() -> None:
    params = SamplingParams(bad_word_ids=((5,), (2, 3, 4)))
    assert _forbidden(params) == [5]
    assert _forbidden(params, outputs=[0, 2, 3]) == [4, 5]
    assert _forbidden(params, outputs=[2], drafts=[3]) == [4, 5]
    assert _forbidden(params, outputs=[3], drafts=[2, 3]) == [4, 5]
    assert _forbidden(params, outputs=[2, 3], drafts=[0]) == [5]


def test_min_tokens_yields_to_allowed_tokens_that_are_all_ends() -> None:
    assert _forbidden(SamplingParams(min_tokens=3, allowed_token_ids=(EOS,))) == [0, 2, 3, 4, 5]
    assert _forbidden(SamplingParams(min_tokens=3, allowed_token_ids=(EOS, 2))) == [0, 1, 3, 4, 5]
    both = SamplingParams(min_tokens=3, allowed_token_ids=(EOS, 2), bad_word_ids=((2,),))
    assert _forbidden(both) == [0, 2, 3, 4, 5]


def test_a_device_draws_under_the_same_masks() -> None:
    logits = np.random.default_rng(2).normal(0, 2, (4, 40)).astype(np.float32)
    params = SamplingParams(temperature=0, allowed_token_ids=tuple(range(0, 40, 3)), bad_word_ids=((9,), (6, 12)))
    sampler = Sampler(params, key=3, eos_id=EOS, prompt_ids=(), output_ids=[6])
    rows = [DrawRow(sampler, 5 + place, [3, 6, 0][:place]) for place in range(4)]
    expected = draw_rows(logits, rows)
    assert draw_groups([Group(torch.from_numpy(logits), rows)]) == [expected]
    ids = [token.id for token in expected if isinstance(token, SampledToken)]
    barred = [{9, 12}, {9}, {9, 12}, {9}]
    open_ids = [[token for token in range(0, 40, 3) if token not in each] for each in barred]
    assert ids == [max(each, key=logits[place].__getitem__) for place, each in enumerate(open_ids)]


@pytest.fixture(scope="module", name="world")
def _world() -> Iterator[World]:
    made = World()
    yield made
    made.engine.close()


@pytest.fixture(scope="module", name="drafting")
def _drafting() -> Iterator[World]:
    made = World(options=replace(OPTIONS, speculation=DRAFTING, async_scheduling=True))
    yield made
    made.engine.close()


@pytest.fixture(name="engines")
def _engines(world: World, drafting: World) -> list[World]:
    return [world, drafting]


def test_greedy_takes_the_best_of_the_allowed_tokens(engines: list[World]) -> None:
    allowed = (7, 90, 91, 300)
    said = [world.generate(prompt_of(20), replace(LONG, allowed_token_ids=allowed)).ids for world in engines]
    assert said[0] == said[1]
    assert len(said[0]) == 16
    assert set(said[0]) <= set(allowed)
    # What is told of a token is of the raw logits: each one's of the first row is known by allowing it alone.
    first = replace(GREEDY, max_tokens=1)
    told = [
        engines[0].generate(prompt_of(20), replace(first, allowed_token_ids=(token,))).tokens[0] for token in allowed
    ]
    assert [token.id for token in told] == list(allowed)
    assert said[0][0] == max(told, key=lambda token: token.logprob or 0.0).id


@pytest.mark.parametrize("sampling", [LONG, replace(SEEDED, max_tokens=16, logprobs=None)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_bad_word_is_never_said_with_or_without_drafts(
    engines: list[World], sampling: SamplingParams, tokens: int
) -> None:
    plain = engines[0].generate(prompt_of(20), sampling).ids
    words: tuple[tuple[int, ...], ...] = ()
    said: list[list[int]] = []
    for _ in range(2):  # each time, words that would be said otherwise
        before = said[0] if said else plain
        words += tuple(tuple(before[at : at + tokens]) for at in (0, 4, 9))
        asked = replace(sampling, bad_word_ids=words)
        said = [world.generate(prompt_of(20), asked).ids for world in engines]
        assert said[0] == said[1]
        assert len(said[0]) == 16
        assert not any(_occurs(word, said[0]) for word in words)
        assert all(_occurs(word, plain) for word in words[:3])


def test_a_word_that_began_on_the_rank_before_is_not_completed(world: World) -> None:
    plain = world.generate(prompt_of(20), LONG).ids
    word = tuple(plain[3:6])
    for cut in (4, 5):
        rest = world.generate(prompt_of(20), replace(LONG, bad_word_ids=(word,)), resumed=plain[:cut]).ids
        assert not _occurs(word, [*plain[:cut], *rest])
        assert len(rest) == 16 - cut


def test_drafts_that_are_judged_by_their_law_keep_to_the_masks(drafting: World) -> None:
    allowed = tuple(range(40, 44))  # so few that drafts stand, and the next row's mask depends on them
    asked = SamplingParams(
        max_tokens=40, ignore_eos=True, allowed_token_ids=allowed, bad_word_ids=tuple((a, a) for a in allowed)
    )
    heard = [
        drafting.submit(drafting.request(prompt_of(9, seed=seed), asked, fidelity=Fidelity.FAST)) for seed in range(3)
    ]
    drafting.engine.take_works()
    drafting.run()
    counts = add_up(4, [work.speculation for work in drafting.engine.take_works() if work.speculation is not None])
    assert 0 < counts.accepted.sum() < counts.verified.sum()
    for each in heard:
        assert len(each.ids) == 40
        assert set(each.ids) <= {*allowed}
        assert all(one != other for one, other in pairwise(each.ids))


def test_others_in_the_batch_say_what_they_say_alone(engines: list[World]) -> None:
    for world in engines:
        masked = world.submit(world.request(prompt_of(12), replace(LONG, allowed_token_ids=(5, 6))))
        free = [world.submit(world.request(prompt_of(17), each)) for each in (GREEDY, SEEDED)]
        world.run()
        assert set(masked.ids) <= {5, 6}
        assert [tuple(each.tokens) for each in free] == [oracle(17, GREEDY), oracle(17, SEEDED)]


def _digits() -> tuple[int, ...]:
    token_bytes = tiny_model().tokenizer.token_bytes
    return tuple(token for token in range(3, 500) if token_bytes(token) in (b"3", b"7"))


def _ends_with(heard: Heard, field: str) -> None:
    assert heard.end.reason is FinishReason.ERROR
    assert isinstance(heard.end.error, InvalidFieldError)
    assert heard.end.error.field == field


def test_a_form_and_allowed_tokens_both_hold(engines: list[World]) -> None:
    digits = GrammarSpec(GrammarKind.REGEX, r"\d{4}")
    for world in engines:
        both = SamplingParams(seed=1, max_tokens=9, grammar=digits, allowed_token_ids=(*_digits(), EOS))
        heard = world.generate(prompt_of(9), both)
        assert heard.end.reason is FinishReason.STOP
        assert len(heard.ids) == 5
        assert set(heard.ids[:4]) <= set(_digits())
        # The end of the sequence is not among them: there is no way on.
        stuck = world.generate(prompt_of(9), replace(both, allowed_token_ids=_digits()))
        assert len(stuck.ids) == 4
        _ends_with(stuck, "allowed_token_ids")


def test_words_that_leave_no_token_end_their_request_with_an_error(engines: list[World]) -> None:
    for world in engines:
        other = world.submit(world.request(prompt_of(17), GREEDY))
        asked = replace(LONG, allowed_token_ids=(5, 6), bad_word_ids=((5, 5), (5, 6), (6,)))
        heard = world.submit(world.request(prompt_of(12), asked))
        world.run()
        assert heard.ids == [5]
        _ends_with(heard, "bad_words")
        assert tuple(other.tokens) == oracle(17, GREEDY)


def test_offline_words_are_texts() -> None:
    llm = LLM(CHECKPOINT, context_tokens_max=128)
    (plain,) = llm.generate([prompt_of(20)], LONG)
    words = {llm._tokenizer.token_bytes(token).decode("utf-8", "replace") for token in plain.output.token_ids[:3]}
    asked = replace(LONG, bad_words=tuple(word for word in words if word.isascii() and word.strip()), n=2)
    assert asked.bad_words
    encoded = encode_bad_words(asked, llm._tokenizer.encode).bad_word_ids
    assert any(_occurs(word, plain.output.token_ids) for word in encoded)
    (kept,) = llm.generate([prompt_of(20)], asked)
    for choice in kept.outputs:
        assert len(choice.token_ids) == 16
        assert not any(_occurs(word, choice.token_ids) for word in encoded)
    (refused,) = llm.generate([prompt_of(20)], replace(LONG, allowed_token_ids=(9999,)))
    assert isinstance(refused.error, InvalidFieldError)
    assert refused.error.field == "allowed_token_ids"
