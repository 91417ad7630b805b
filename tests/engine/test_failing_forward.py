"""A forward, or the drawing after it, that fails: it ends the requests it fails for, unless it shows that the engine
itself is broken."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.engine.engine_world import GREEDY, OPTIONS, World, oracle, prompt_of
from whalepod.core.errors import InternalError
from whalepod.engine.device import LaunchedRows
from whalepod.engine.grammar.spec import GrammarKind, GrammarSpec


def _break_runner(world: World, broken: set[bytes]) -> None:
    run = world.engine._runner.run

    def breaking(rows: list[LaunchedRows]) -> object:
        if any(planned.sequence.request.request_id in broken for planned in rows):
            raise RuntimeError("a kernel failed")
        return run(rows)

    world.engine._runner.run = breaking  # type: ignore[method-assign,assignment]


def test_a_failing_forward_ends_the_requests_it_fails_for_and_no_others() -> None:
    world = World()
    good, bad = world.request(prompt_of(20)), world.request(prompt_of(30))
    _break_runner(world, {bad.request_id})
    heard_good, heard_bad = world.submit(good), world.submit(bad)
    world.run()
    assert isinstance(heard_bad.end.error, InternalError)
    assert heard_good.ids == [token.id for token in oracle(20)]
    load = world.engine.load()
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)


def test_a_broken_invariant_is_not_contained() -> None:
    world = World()

    def breaking(rows: object) -> object:
        raise AssertionError("a block is owned twice")

    world.engine._runner.run = breaking  # type: ignore[method-assign,assignment]
    world.submit(world.request(prompt_of(20)))
    with pytest.raises(AssertionError, match="owned twice"):
        world.step()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("guided", [False, True])
def test_a_failing_draw_ends_the_request_it_fails_for_and_no_other(ahead: bool, guided: bool) -> None:
    world = World(options=replace(OPTIONS, async_scheduling=ahead))
    grammar = GrammarSpec.create(GrammarKind.REGEX, "[a-z]{30,40}") if guided else None
    good = world.request(prompt_of(20))
    bad = world.request(prompt_of(30), replace(GREEDY, grammar=grammar, ignore_eos=not guided, max_tokens=8))
    heard_good, heard_bad = world.submit(good), world.submit(bad)
    sampler = world.engine._sequences[bad.request_id].sampler
    apply_rules, draws = sampler.apply_rules, count()

    def breaking(*arguments: Any, **named: Any) -> None:
        if next(draws) >= 2:
            raise RuntimeError("a rule of sampling failed")
        apply_rules(*arguments, **named)

    sampler.apply_rules = breaking  # type: ignore[method-assign]
    world.run()
    assert isinstance(heard_bad.end.error, InternalError)
    assert len(heard_bad.tokens) < 8
    assert heard_good.ids == [token.id for token in oracle(20)]
    load = world.engine.load()
    assert (load.running, load.waiting, load.blocks_free) == (0, 0, load.blocks_total)
    world.engine.close()
