"""The golden serving vectors, through the engine's boundaries, plans, blocks and snapshots."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from whalepod.engine.boundaries import Boundaries
from whalepod.engine.conformity_serving import run_serving_sets
from whalepod.engine.state_image import StateImage
from whalepod.kernels.record_runs import RecordPool
from whalepod.model.conformity import SetResult, Status, Vectors
from whalepod.model.conformity_folder import Mode, VectorFolder

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_a"


@cache
def _folder() -> VectorFolder:
    return VectorFolder.open(GOLDEN, "tiny_a")


def _run(*only: str) -> dict[str, SetResult]:
    """Results by the last words of their names. `only`: run these checks alone."""
    vectors = Vectors.load(GOLDEN / "serving_f32.safetensors")
    results = run_serving_sets(_folder(), vectors, Mode.F32, "serving", only=only)
    return {result.name.split("len100 ")[1]: result for result in results}


def test_state_that_moves_gives_the_recorded_logits() -> None:
    results = _run("hand-off full", "hit, replay")
    assert {result.status for result in results.values()} == {Status.PASSED}
    assert max(result.max_abs or 0 for result in results.values()) < 2e-5


@pytest.mark.slow
def test_every_recorded_path_gives_the_recorded_logits() -> None:
    results = _run()
    assert {name: result.detail for name, result in results.items() if result.status is not Status.PASSED} == {}
    assert len(results) == 11
    assert results["halo"].max_abs == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "planted"),
    [
        ("hand-off full", "one window row fewer"),
        ("mid-generation", "no unfinished group"),
        ("hand-off encoder", "no partial block"),
        ("hit, replay", "replay of one row fewer"),
        ("cold", "floor one lower"),
        ("drafts", "one draft row fewer"),
    ],
)
def test_a_planted_bug_is_caught(check: str, planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match planted:
        case "one window row fewer":
            ring = StateImage._ring

            def shorter(self: StateImage, pool: RecordPool, slot: int, start: int, end: int) -> object:
                return ring(self, pool, slot, min(start + 1, end), end)

            monkeypatch.setattr(StateImage, "_ring", shorter)
        case "one draft row fewer":
            whole = StateImage._ring

            def shorter_draft(self: StateImage, pool: RecordPool, slot: int, start: int, end: int) -> object:
                return whole(self, pool, slot, start + (end - start == 16), end)

            monkeypatch.setattr(StateImage, "_ring", shorter_draft)
        case "no unfinished group":
            group = StateImage._group
            monkeypatch.setattr(StateImage, "_group", lambda self, source, slot, _: group(self, source, slot, 0))
        case "no partial block":
            entries = StateImage._entries

            def whole_blocks_only(self: StateImage, block_id: int, *, tokens: int) -> object:
                return entries(self, block_id, tokens=tokens if tokens == 16 else 0)

            monkeypatch.setattr(StateImage, "_entries", whole_blocks_only)
        case "replay of one row fewer":
            start = Boundaries.replay_start

            def later(self: Boundaries, *, boundary: int, prompt_tokens: int, exact: bool) -> int:
                return start(self, boundary=boundary, prompt_tokens=prompt_tokens, exact=exact) + 1

            monkeypatch.setattr(Boundaries, "replay_start", later)
        case _:
            config = type(_folder().network(Mode.F32).config)
            floor = config.floor
            monkeypatch.setattr(config, "floor", lambda self, tokens: max(0, floor(self, tokens) - 1))
    (result,) = _run(check).values()
    assert result.status is Status.FAILED
