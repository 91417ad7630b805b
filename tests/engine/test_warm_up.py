"""A rank that has warmed up is one that has not, but for its kernels and graphs: nothing is held, stored, told or
measured."""

from __future__ import annotations

import os
import pty
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from tests.engine.engine_world import OPTIONS, SEEDED, oracle, tiny_model
from tests.engine.memory_store import MemoryStore
from tests.engine.started_rank import AHEAD, StartedRank, tokens_of
from whalepod.core.errors import InternalError
from whalepod.engine.device import LaunchedRows
from whalepod.engine.engine import Engine
from whalepod.engine.interface import Fidelity, Work
from whalepod.engine.options import RankOptions
from whalepod.engine.rank import EngineRank
from whalepod.engine.runner import RowLogits, StepRunner
from whalepod.engine.speculation.options import SpeculationOptions
from whalepod.engine.warm_up import warm_up
from whalepod.model.decode_graphs import batch_sizes
from whalepod.model.draft import Anchor, Chooser, Drafts
from whalepod.model.tensor_layout import ModelRole

BOTH = (Fidelity.FAST, Fidelity.EXACT)
DRAFTING = SpeculationOptions(draft_tokens=3)


@dataclass(slots=True)
class Watched:
    """A StepRunner that notes how many rows each step has of each of its requests."""

    inner: StepRunner
    steps: list[list[int]] = field(default_factory=list)
    fails: bool = False

    def run(self, rows: Sequence[LaunchedRows]) -> Sequence[RowLogits | None]:
        if self.fails:
            raise RuntimeError("a kernel cannot be compiled")
        self.steps.append([len(row.segment.token_ids) for row in rows])
        return self.inner.run(rows)

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        return self.inner.draft(anchors, choose, tokens)


@dataclass(slots=True)
class Warming:
    """An engine and what it computes when it warms up."""

    options: RankOptions = OPTIONS
    role: ModelRole = ModelRole.FULL
    store: MemoryStore = field(default_factory=MemoryStore)
    progress: list[tuple[int, int]] = field(default_factory=list)
    fails: bool = False
    watched: Watched = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(
            tiny_model(self.role), self.options, store=self.store, deliver=lambda _: None, instrument=self._watch
        )

    def _watch(self, runner: StepRunner) -> Watched:
        self.watched = Watched(runner, fails=self.fails)
        return self.watched

    def warm_up(self, work: Work = Work.GENERATE, fidelities: Sequence[Fidelity] = (Fidelity.FAST,)) -> None:
        warm_up(
            self.engine,
            tiny_model(self.role),
            self.options,
            fidelities=fidelities,
            work=work,
            progress=lambda done, total: self.progress.append((done, total)),
        )
        transfers = self.engine.transfers
        assert transfers is not None
        while transfers.work_on_load(wait=False) or transfers.work_on_write(wait=False):
            pass


@pytest.mark.parametrize("options", [OPTIONS, AHEAD, replace(AHEAD, speculation=DRAFTING)], ids=["", "ahead", "drafts"])
def test_a_rank_that_has_warmed_up_holds_and_stores_nothing_and_says_the_same(options: RankOptions) -> None:
    store = MemoryStore()
    world = StartedRank(options=options, store=store, start=False)
    before = world.rank.load()
    world.rank.warm_up(Work.GENERATE, BOTH)
    assert world.rank.load() == before
    world.rank.start()
    try:
        request = world.submit(40, SEEDED, shares=False)
        world.end(request)
        assert tokens_of(world.events(request)) == oracle(40, SEEDED)
        assert {event.request_id for event in world.said} == {request.request_id}, "nobody else was heard of"
        assert world.rank.load().blocks_free == before.blocks_free
    finally:
        world.stop()
    assert not (store.calls or store.blocks or store.snapshots)


@pytest.mark.parametrize("drafts", [0, 3])
def test_every_shape_of_a_decode_graph_is_computed_and_a_whole_chunk(drafts: int) -> None:
    speculation = replace(DRAFTING, draft_tokens=drafts) if drafts else None
    options = replace(OPTIONS, slots=9, blocks=80, chunk_tokens=48, speculation=speculation)
    world = Warming(options)
    world.warm_up(fidelities=BOTH)
    assert [48] in world.watched.steps
    for size in batch_sizes(9, rows=1 + drafts):
        assert world.watched.steps.count([1 + drafts] * size) >= 2, size
    beside = options.chunk_tokens_beside_decode
    assert any(sorted(step) == sorted([1 + drafts, beside]) for step in world.watched.steps), "a chunk beside decode"
    batches = 1 + len(batch_sizes(9, rows=1 + drafts))
    assert world.progress == [(done, 2 * batches) for done in range(1, 2 * batches + 1)]
    assert world.engine.take_works() == []


@pytest.mark.parametrize("role", [ModelRole.FULL, ModelRole.ENCODER])
def test_a_prefill_rank_computes_prompts_and_leaves_no_hand_off(role: ModelRole) -> None:
    world = Warming(role=role)
    world.warm_up(Work.PREFILL, BOTH)
    assert world.watched.steps.count([64]) == len(BOTH)
    assert world.engine.load().blocks_free == OPTIONS.blocks
    assert not (world.store.calls or world.store.blocks or world.store.snapshots)


@pytest.mark.parametrize(
    "limits",
    [{"slots": 8, "blocks": 2}, {"slots": 1, "blocks": 1}, {"context_tokens_max": 2}, {"chunk_tokens": 2}],
    ids=str,
)
def test_a_rank_that_can_hold_little_warms_up_with_that(limits: dict[str, int]) -> None:
    world = Warming(replace(OPTIONS, speculation=DRAFTING, **limits))
    world.warm_up()
    assert world.watched.steps
    assert world.engine.load().blocks_free == world.engine.load().blocks_total


def test_a_rank_that_cannot_compute_says_so_before_it_serves() -> None:
    with pytest.raises(InternalError, match="the model failed"):
        Warming(fails=True).warm_up()


class SlowClock:
    """Everything lasts."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def unix_ms(self) -> int:
        return 0


def test_a_person_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as beside, os.fdopen(theirs, "w") as terminal:
        shown = beside.submit(_read_all, ours)  # or the bar would wait for somebody to read it
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stderr", terminal)
        rank = EngineRank(tiny_model(), OPTIONS, store=None, on_step=lambda _: None, clock=SlowClock())
        rank.warm_up(Work.GENERATE, (Fidelity.FAST,))
        terminal.close()
    assert "warm-up" in shown.result()
    assert "4/4 batches" in shown.result()


def _read_all(terminal: int) -> str:
    """Until nobody has its other end."""
    read = b""
    with suppress(OSError), os.fdopen(terminal, "rb", buffering=0) as file:
        while part := file.read(4096):
            read += part
    return read.decode()
