"""Requests under a grammar, in an engine: compiled beside it, guided by it, and none in another's way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from tests.engine.engine_world import CHECKPOINT, OPTIONS, Heard, World, decode, prefill, prompt_of, tiny_model
from tests.engine.memory_store import MemoryStore
from whalepod.core.errors import DeadlineError, InvalidFieldError
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.interface import FinishReason, Handoff, SampledToken
from whalepod.engine.llm import LLM
from whalepod.engine.sampling_params import SamplingParams

EOS = 1
MARKER = 400
"""Ends the reasoning of a model whose vocabulary has no such token."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "é", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ENDLESS = "start: A\nA: " + " & ".join(f"/(.*a.{{{index}}}.*)/" for index in range(30))
DEAD_END = "(?:x|y)[^\\s\\S]"
"""A first token can be drawn, a second one cannot."""


def regex(pattern: str, **fields: object) -> SamplingParams:
    return SamplingParams(grammar=GrammarSpec(GrammarKind.REGEX, pattern), **({"seed": 1, "max_tokens": 60} | fields))  # type: ignore[arg-type]


def text_of(heard: Heard) -> str:
    tokenizer = tiny_model().tokenizer
    return b"".join(tokenizer.token_bytes(token_id) for token_id in heard.ids if token_id != EOS).decode()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    made.engine.close()


def test_an_answer_that_stops_is_a_sentence_of_its_grammar(world: World) -> None:
    greedy, drawn = SamplingParams(temperature=0, max_tokens=30), SamplingParams(seed=1, max_tokens=60)
    asked = {
        "regex": {"schema_type": "regex", "schema": r"\d{3}-[ab]{2,4}"},
        "schema": {"schema_type": "json_schema", "schema": SCHEMA},
        "ebnf": {"schema_type": "ebnf", "schema": 'root ::= "(" root ")" | [0-9]'},
        "object": {"schema_type": "json_object"},
    }
    heard = {
        (name, params.greedy): world.submit(world.request(prompt_of(9), replace(params, so_args=asked[name])))
        for name, params in [("regex", greedy), ("schema", drawn)]
    }
    heard |= {
        (name, False): world.submit(world.request(prompt_of(9), replace(drawn, max_tokens=12, so_args=asked[name])))
        for name in ("ebnf", "object")
    }
    world.run()
    stopped = [key for key, one in heard.items() if one.end.reason is FinishReason.STOP]
    assert {"regex", "schema"} <= {name for name, _ in stopped}
    for name, is_greedy in stopped:
        assert heard[name, is_greedy].ids[-1] == EOS
        _judge(name, text_of(heard[name, is_greedy]))
    assert tiny_model().tokenizer.token_bytes(heard["object", False].ids[0]).startswith(b"{")


def _judge(name: str, text: str) -> None:
    match name:
        case "regex":
            assert re.fullmatch(r"\d{3}-[ab]{2,4}", text)
        case "ebnf":
            assert re.fullmatch(r"\(*\d\)*", text)
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case _:
            assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (GrammarSpec(GrammarKind.REGEX, "(a"), "unclosed group"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"sting"}'), "Invalid type: sting"),
        (GrammarSpec(GrammarKind.EBNF, "root ::= x"), "rule x is not defined"),
        (GrammarSpec(GrammarKind.REGEX, "[^\\s\\S]"), "no token can follow"),
        (GrammarSpec(GrammarKind.REGEX, DEAD_END), "no token can follow"),
    ],
)
def test_a_grammar_without_a_way_on_ends_its_request_with_an_error_and_others_go_on(
    world: World, spec: GrammarSpec, reason: str
) -> None:
    other = world.submit(world.request(prompt_of(12), regex("[a-c]{4}")))
    heard = world.submit(world.request(prompt_of(12), SamplingParams(grammar=spec, seed=1, max_tokens=9)))
    world.run()
    assert heard.end.reason is FinishReason.ERROR
    assert isinstance(heard.end.error, InvalidFieldError)
    assert heard.end.error.field == "grammar"
    assert reason in str(heard.end.error)
    assert re.fullmatch("[a-c]{4}", text_of(other))


def test_a_request_whose_grammar_is_being_compiled_is_in_nobodys_way() -> None:
    world = World(options=replace(OPTIONS, slots=1))
    try:
        slow = world.request(prompt_of(10), SamplingParams(grammar=GrammarSpec(GrammarKind.EBNF, ENDLESS)))
        waiting, quick = world.submit(slow), world.submit(world.request(prompt_of(10)))
        while world.engine.runnable:
            world.step()
        assert quick.end.reason is FinishReason.LENGTH
        assert world.engine.compiling
        assert not waiting.ends
        world.engine.cancel(slow.request_id, slow.attempt)
        world.engine.check()
        assert not world.engine.compiling
    finally:
        world.engine.close()


def test_a_deadline_passes_while_a_grammar_is_being_compiled() -> None:
    world = World()
    try:
        params = SamplingParams(grammar=GrammarSpec(GrammarKind.EBNF, ENDLESS))
        heard = world.submit(world.request(prompt_of(10), params, timeout_s=0))
        world.run()
        assert isinstance(heard.end.error, DeadlineError)
    finally:
        world.engine.close()


def test_e11_reasoning_is_free_until_its_marker_and_cannot_end_the_answer(world: World) -> None:
    params = regex("[a-c]{3}", temperature=0, grammar_starts_after=MARKER, logit_bias={EOS: 100.0, MARKER: 90.0})
    heard = world.generate(prompt_of(15), params)
    assert heard.ids[0] == MARKER
    assert re.fullmatch("[a-c]{3}", text_of(heard).removeprefix(tiny_model().tokenizer.token_bytes(MARKER).decode()))
    free = regex("[a-c]{3}", grammar_starts_after=MARKER, logit_bias={MARKER: -100.0, EOS: 100.0}, max_tokens=8)
    heard = world.generate(prompt_of(15), free)
    assert (heard.end.reason, EOS in heard.ids) == (FinishReason.LENGTH, False)


def test_the_end_of_a_grammar_comes_before_min_tokens_if_nothing_else_can(world: World) -> None:
    heard = world.generate(prompt_of(15), regex("[a-c]{3}", min_tokens=30))
    assert heard.end.reason is FinishReason.STOP
    assert re.fullmatch("[a-c]{3}", text_of(heard))
    longer = world.generate(prompt_of(15), regex("[a-c]*", min_tokens=5, logit_bias={EOS: 100.0}))
    assert len(longer.ids) == 6


def test_max_tokens_cuts_a_sentence(world: World) -> None:
    heard = world.generate(prompt_of(15), regex("[a-c]{30}", max_tokens=2))
    assert (heard.end.reason, len(heard.ids)) == (FinishReason.LENGTH, 2)


GUIDED = [
    regex(pattern, seed=seed, max_tokens=12) for seed, pattern in enumerate(["[ab]{9}", r"(\d,){4}\d", "x{5,9}y"])
]


def alone(world: World, number: int) -> list[int]:
    return world.generate(prompt_of(30 + number, seed=number), GUIDED[number]).ids


def test_e13_preempted_requests_go_on_where_they_were_in_their_grammars(world: World) -> None:
    crowded = World(options=replace(OPTIONS, blocks=8))
    try:
        for number, params in enumerate(GUIDED):  # Grammars are compiled, so that all start together.
            crowded.submit(crowded.request(prompt_of(3, seed=number), params))
            crowded.run()
        heard = [
            crowded.submit(crowded.request(prompt_of(30 + number, seed=number), params))
            for number, params in enumerate(GUIDED)
        ]
        preemptions = 0
        while crowded.step() or crowded.worked or crowded.engine.runnable or crowded.engine.compiling:
            preemptions += sum(sequence.parked is not None for sequence in crowded.engine._scheduler.waiting)
        assert preemptions
        assert [one.ids for one in heard] == [alone(world, number) for number in range(len(GUIDED))]
    finally:
        crowded.engine.close()


@pytest.mark.parametrize("number", range(len(GUIDED)))
def test_e13_a_sentence_begun_on_a_prefill_rank_goes_on_on_a_decode_rank(world: World, number: int) -> None:
    store = MemoryStore()
    first, second = World(store=store), World(store=store)
    try:
        prompt = prompt_of(30 + number, seed=number)
        handoff = prefill(first, prompt, GUIDED[number], name="moves")
        assert handoff.stored
        heard = decode(second, prompt, handoff, GUIDED[number], name="moves")
        assert heard.ids == alone(world, number)
    finally:
        first.engine.close()
        second.engine.close()


def test_a_hand_off_that_comes_before_the_grammar_is_followed_once_it_is_there(world: World) -> None:
    expected = alone(world, 0)
    fresh = World()
    try:
        request = fresh.request(prompt_of(30), GUIDED[0], await_handoff=True)
        heard = fresh.submit(request)
        fresh.engine.hand_off(request.request_id, 1, Handoff(0, None, first_token=SampledToken(expected[0])))
        fresh.run()
        assert heard.ids == expected
    finally:
        fresh.engine.close()


@pytest.mark.parametrize("grammar_first", [True, False])
def test_a_first_token_that_breaks_the_grammar_ends_the_request_with_an_error(
    world: World, grammar_first: bool
) -> None:
    request = world.request(prompt_of(30), regex("[q-z]{7}" if grammar_first else "[r-z]{8}"), await_handoff=True)
    heard = world.submit(request)
    if grammar_first:
        world.run()
    wrong = SampledToken(tiny_model().tokenizer.encode("a")[0])
    world.engine.hand_off(request.request_id, 1, Handoff(0, None, first_token=wrong))
    world.run()
    assert isinstance(heard.end.error, InvalidFieldError)
    assert "do not follow the grammar" in str(heard.end.error)


def test_the_offline_interface_takes_so_args_and_one_bad_grammar_does_not_lose_the_others() -> None:
    llm = LLM(CHECKPOINT)
    asked = [
        SamplingParams(seed=1, max_tokens=12, so_args={"schema_type": "regex", "schema": "[ab]{3}"}),
        SamplingParams(seed=1, max_tokens=12, so_args={"schema_type": "json", "schema": {"type": "sting"}}),
        SamplingParams(seed=1, max_tokens=2),
    ]
    try:
        good, bad, free = llm.generate([prompt_of(9)] * 3, asked)
    finally:
        llm.close()
    assert re.fullmatch("[ab]{3}", good.output.text)
    assert isinstance(bad.error, InvalidFieldError)
    assert "Invalid type: sting" in str(bad.error)
    assert (free.error, free.output.finish_reason) == (None, FinishReason.LENGTH)
