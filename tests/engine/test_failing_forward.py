"""A forward that fails: it ends the requests it fails for, unless it shows that the engine itself is broken."""

from __future__ import annotations

import pytest

from tests.engine.engine_world import World, oracle, prompt_of
from whalepod.core.errors import InternalError
from whalepod.engine.device import LaunchedRows


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
