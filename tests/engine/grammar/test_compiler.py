"""Grammars are compiled beside the engine, tried in a child first, once each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

import pytest

from tests.engine.grammar.regexes import REGEXES
from tests.engine.grammar.schemas import schemas
from tests.engine.grammar.shipped_vocabulary import EOS_ID, VOCAB_SIZE, accepts, tokenizer
from whalepod.core.errors import CapacityError, InternalError
from whalepod.engine.grammar.compiler import GrammarCompiler, grammar_checker, rank_compiler
from whalepod.engine.grammar.errors import GrammarError
from whalepod.engine.grammar.matcher import CompiledGrammar
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec
from whalepod.engine.grammar.trial_process import TrialSetup

CPU_S_MAX = 1.0
ENDLESS = "start: A\nA: " + " & ".join(f"/(.*a.{{{index}}}.*)/" for index in range(30))
"""llguidance intersects these for hours, and no limit of its own ends it."""
DEEP = "start: A0\n" + "\n".join(f'A{index}: "a" A{index + 1}' for index in range(9000)) + '\nA9000: "z"\n'
"""Overflows the stack of whoever compiles it."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler[CompiledGrammar]]:
    made = rank_compiler(tokenizer(), vocab_size=VOCAB_SIZE, eos_id=EOS_ID, cpu_s_max=CPU_S_MAX)
    yield made
    made.close()


def ebnf(source: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.EBNF, source)


def regex(source: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, source)


def test_a_grammar_comes_back_compiled(compiler: GrammarCompiler[CompiledGrammar]) -> None:
    assert accepts(compiler.compile(regex("ab+")).result(60), "abb")


def test_the_same_grammar_is_compiled_once(compiler: GrammarCompiler[CompiledGrammar]) -> None:
    first = compiler.compile(regex("once"))
    assert compiler.compile(regex("once")) is first
    assert compiler.compile(regex("once")).result(60) is first.result(60)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (regex("(?=a)"), "look-ahead"),
        (regex("a("), "unclosed group"),
        (regex("[^\\s\\S]"), "no token can follow"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"$ref":"#"}'), "no token can follow"),
        (GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"sting"}'), "Invalid type: sting"),
        (ebnf("start: x"), "unknown name"),
        (ebnf("root ::= x"), "rule x is not defined"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(
    compiler: GrammarCompiler[CompiledGrammar], spec: GrammarSpec, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(spec).result(60)


def test_a_grammar_that_takes_for_ever_is_given_up_and_others_go_on(compiler: GrammarCompiler[CompiledGrammar]) -> None:
    endless = compiler.compile(ebnf(ENDLESS))
    others = [compiler.compile(regex(f"beside {index}")) for index in range(5)]
    done = wait([endless, *others], 60).done
    assert len(done) == 6
    assert all(other.exception() is None for other in others)
    with pytest.raises(GrammarError, match="takes longer than 1 s"):
        endless.result()
    assert compiler.compile(ebnf(ENDLESS)) is endless, "it must not be tried again"


def test_a_grammar_that_ends_the_process_that_compiles_it_ends_only_that_one(
    compiler: GrammarCompiler[CompiledGrammar],
) -> None:
    with pytest.raises(GrammarError, match="too large or too deeply nested"):
        compiler.compile(ebnf(DEEP)).result(60)
    assert accepts(compiler.compile(regex("after that")).result(60), "after that")


def test_a_checker_only_says_whether_it_would_compile() -> None:
    checker = grammar_checker(tokenizer(), vocab_size=VOCAB_SIZE, eos_id=EOS_ID)
    try:
        assert checker.compile(regex("a")).result(60) is None
        with pytest.raises(GrammarError):
            checker.compile(regex("a(")).result(60)
    finally:
        checker.close()


def _compiler(**limits: int) -> GrammarCompiler[str]:
    setup = TrialSetup(tokenizer().json, VOCAB_SIZE, EOS_ID, CPU_S_MAX)
    return GrammarCompiler(setup, lambda _, lowered: lowered, workers=1, **limits)


def test_no_more_than_so_many_grammars_wait() -> None:
    compiler = _compiler(pending_max=2)
    try:
        pending = [compiler.compile(regex(f"waits {index}")) for index in range(2)]
        with pytest.raises(CapacityError):
            compiler.compile(regex("one more"))
        wait(pending, 60)
        compiler.compile(regex("one more")).result(60)
    finally:
        compiler.close()


def test_the_cache_forgets_what_was_longest_unused() -> None:
    compiler = _compiler(cache_bytes_max=3 * (64 << 10) + 4000)
    try:
        futures: dict[str, Future[str]] = {}
        for name in ("a", "b", "c", "a", "d"):
            futures[name] = compiler.compile(regex(name))
            futures[name].result(60)
        assert compiler.compile(regex("a")) is futures["a"]
        assert compiler.compile(regex("c")) is futures["c"]
        assert compiler.compile(regex("b")) is not futures["b"]
    finally:
        compiler.close()


def test_a_failure_that_is_not_the_grammars_is_not_remembered() -> None:
    failures = iter([InternalError("for another reason")])

    def finish(_: GrammarSpec, lowered: str) -> str:
        for failure in failures:
            raise failure
        return lowered

    compiler = GrammarCompiler(TrialSetup(tokenizer().json, VOCAB_SIZE, EOS_ID, CPU_S_MAX), finish, workers=1)
    try:
        with pytest.raises(InternalError):
            compiler.compile(regex("a")).result(60)
        assert compiler.compile(regex("a")).result(60)
    finally:
        compiler.close()


def test_closing_ends_what_is_being_compiled() -> None:
    compiler = _compiler()
    compiler.compile(regex("started")).result(60)
    busy, queued = compiler.compile(ebnf(ENDLESS)), compiler.compile(regex("queued"))
    while not busy.running():
        time.sleep(0.01)
    compiler.close()
    assert queued.cancelled()
    assert isinstance(busy.exception(60), InternalError)


@pytest.mark.slow
def test_every_grammar_of_the_tests_passes_its_trial(compiler: GrammarCompiler[CompiledGrammar]) -> None:
    specs = [GrammarSpec.create(GrammarKind.JSON_SCHEMA, schema) for schema in schemas()]
    specs += [regex(pattern) for pattern in REGEXES]
    for spec in specs:
        compiler.compile(spec).result(60)
