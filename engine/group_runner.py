"""Runs the rows of a rank's steps: alone, or with its group, which shares the experts or divides prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whalepod.core.errors import WorkerLostError
from whalepod.model.caches import Caches
from whalepod.model.config import ModelConfig
from whalepod.model.draft import Anchor, Chooser, Drafts

from .context_parallel.following import Follower
from .context_parallel.runner import ContextRunner
from .device import LaunchedRows
from .expert_parallel.group import Job
from .expert_parallel.group_loop import GroupLoop
from .expert_parallel.transport import GroupBrokenError
from .rank_model import RankModel
from .runner import RowLogits, Runner, StepRunner
from .saved_rings import SavedRings
from .state_image import StateImage
from .transfers import Transfers


def step_runner(model: RankModel, caches: Caches, image: StateImage, transfers: Transfers | None) -> StepRunner:
    """What computes the steps of a rank: its network, within its group if it shares its experts or divides prompts.
    A rank that follows another in such a group does so in `caches`, of which `image` is: its own steps must have no
    rows."""
    runner = Runner(model.network, caches)
    if model.context is not None:
        context = model.context
        context.loop.follow = Follower(model.network, caches, image, transfers, context.loop).follow
        stores = transfers is not None
        return ContextRunner(runner, model.network, caches, context.loop, rows_min=context.rows_min, stores=stores)
    if model.experts is None:
        return runner
    assert model.experts.loop is not None, "a rank that shares its experts needs its group"
    return GroupRunner(runner, caches, model.config, model.experts.loop)


class GroupRunner:
    """A StepRunner."""

    def __init__(self, inner: StepRunner, caches: Caches, config: ModelConfig, loop: GroupLoop) -> None:
        self._inner = inner
        self._caches = caches
        self._loop = loop
        self._block = config.dspark_block_size
        self._decode_rows_max = self._block + 1
        self._again_rows_max = min(
            caches.ring_rows - config.window + 1, caches.group_ring_rows - config.group_tokens + 1
        )

    def run(self, rows: Sequence[LaunchedRows]) -> Sequence[RowLogits | None]:
        """As the inner one does. Raises WorkerLostError once the rank has left its group."""
        counts = [len(row.segment.token_ids) for row in rows]
        slots = [row.slot.index for row, count in zip(rows, counts, strict=True) if count > self._again_rows_max]
        job = Job(
            rows=sum(counts),
            call=lambda: self._inner.run(rows),
            prompts=max(counts) > self._decode_rows_max,
            undo=SavedRings(self._caches, slots).restore if slots else None,
        )
        return self._do(job)

    def draft(self, anchors: Sequence[Anchor], choose: Chooser, tokens: int) -> Drafts:
        """Likewise. All exchanges come before the first choice: an aborted pass has chosen nothing."""
        rows = len(anchors) * self._block
        return self._do(Job(rows=rows, call=lambda: self._inner.draft(anchors, choose, tokens), draft=True))

    def _do(self, job: Job) -> Any:  # noqa: ANN401  whatever the job returns
        try:
            return self._loop.run(job)
        except GroupBrokenError as error:
            raise WorkerLostError(str(error)) from None
