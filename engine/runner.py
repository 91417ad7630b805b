"""Runs the rows of a step: sequences in, logits out. The only line of the engine that touches the network."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.numerics import whole_batches
from whalepod.model.batch import Segment
from whalepod.model.caches import Caches
from whalepod.model.decode_graphs import DecodeGraphs
from whalepod.model.draft import Anchor, Chooser, Drafts
from whalepod.model.forward_pass import ForwardPass
from whalepod.model.network import Network

from .interface import Fidelity
from .prompt_scores import SCORED_VALUES_AT_ONCE, PromptScores

if TYPE_CHECKING:
    from .device import LaunchedRows

log = logging.getLogger(__name__)

RowLogits = NDArray[np.float32] | Tensor
"""[rows, vocab] float32: an array on a CPU. On a GPU a tensor there, valid until the next rows are computed."""
LogitsOrError = RowLogits | None | Exception
"""Of the rows that asked for them, None if none did, or what computing them raised."""


class StepRunner(Protocol):
    """Computes the rows of a step: the network, or what stands in for it."""

    def run(self, rows: Ordered[LaunchedRows]) -> Ordered[RowLogits | None]: ...

    def draft(self, anchors: Ordered[Anchor], choose: Chooser, tokens: int) -> Drafts: ...


class Runner:
    """One network over one set of caches."""

    def __init__(self, network: Network, caches: Caches) -> None:
        self._network = network
        self._caches = caches
        self._graphs = DecodeGraphs(network, caches) if DecodeGraphs.can_hold(network, caches) else None

    def run(self, rows: Ordered[LaunchedRows]) -> list[RowLogits | None]:
        """Compute the rows. For each: logits of those from `logits_start` on, None if there are none.

        Rows of requests that are all `fast` are computed in whole batches; one `exact` request among them, and all are
        computed in tiles (`design.md` §4). This is where it is decided.
        """
        with whole_batches(all(row.sequence.request.fidelity is Fidelity.FAST for row in rows)):
            return self._compute(rows)

    def _compute(self, rows: Ordered[LaunchedRows]) -> list[RowLogits | None]:
        on_device = self._logits(rows).float()
        logits: RowLogits = on_device if on_device.is_cuda else on_device.numpy()
        if on_device.is_cuda and any(row.guided for row in rows):
            torch.cuda.current_stream().synchronize()  # nothing is drawn of these yet that would wait for them
        counts = [
            0 if start is None else end - start
            for start, end in ((r.segment.logits_start, r.segment.end) for r in rows)
        ]
        ends = np.cumsum(counts)
        return [logits[end - count : end] if count else None for count, end in zip(counts, ends, strict=True)]

    def _logits(self, rows: Ordered[LaunchedRows]) -> Tensor:
        """[rows, vocab] of the rows that asked for them."""
        segments = [row.segment for row in rows]
        if self._graphs is not None and not any(row.sequence.prompt_scores or row.segment.images for row in rows):
            replayed = self._graphs.logits(segments)
            if replayed is not None:
                return replayed
        run = self._network.compute(segments, self._caches)
        for index, row in enumerate(rows):
            if row.sequence.prompt_scores is not None:
                self._score(run, index, row.segment, row.sequence.prompt_scores)
        return self._network.logits(run)

    def draft(self, anchors: Ordered[Anchor], choose: Chooser, tokens: int) -> Drafts:
        """Drafts behind sequences whose rows before their anchors are computed. Changes no cache."""
        assert self._network.drafter is not None, "this model has no draft blocks"
        return self._network.drafter.draft(anchors, self._caches, choose=choose, tokens=tokens)

    def _score(self, run: ForwardPass, index: int, segment: Segment, scores: PromptScores) -> None:
        """Of segment `index`, whose rows all ran to the last layer."""
        wanted = scores.wanted(segment.start, segment.end)
        at_once = max(1, SCORED_VALUES_AT_ONCE // self._network.config.vocab_size)
        for start in range(wanted.start, wanted.stop, at_once):
            count = min(at_once, wanted.stop - start)
            logits = self._network.logits(run, rows=run.plan.kept_rows(index, start, count))
            scores.take(logits.float().cpu().numpy())


def run_isolated(runner: StepRunner, rows: Ordered[LaunchedRows]) -> list[LogitsOrError]:
    """Logits, or an error for exactly those sequences whose rows cannot be computed. A broken invariant is raised."""
    if not rows:
        return []
    try:
        return [*runner.run(rows)]
    except AssertionError:
        raise  # it stops the rank
    except Exception as error:
        if len(rows) == 1:
            log.exception("the rows of a request cannot be computed")
            return [error]
    log.warning("a step failed, each of its requests runs alone", extra={"requests": len(rows)})
    return [_kept(result) for row in rows for result in run_isolated(runner, [row])]


def _kept(result: LogitsOrError) -> LogitsOrError:
    """Still there after the next rows are computed."""
    return result.clone() if isinstance(result, Tensor) else result


def on_host(logits: RowLogits) -> NDArray[np.float32]:
    return logits.cpu().numpy() if isinstance(logits, Tensor) else logits
