"""Times the parts of one layer's exchange, between the marks that a transport sets around what it exchanges."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from whalepod.engine.expert_parallel.dispatch import Dispatcher, DispatchMode, compute_arrived
from whalepod.engine.expert_parallel.expert_bank import LayerExperts
from whalepod.engine.expert_parallel.peer_memory import PeerMemory
from whalepod.engine.expert_parallel.placement import Placement
from whalepod.engine.expert_parallel.transport import Transport
from whalepod.kernels.experts import expert_outputs

REPEATS = 50
WARM_UP = 5
GRAPH_ROWS_MAX = 512
GRAPH_CALLS = 20
"""In one graph, one after the other: ranks do not start it at the same moment."""

Mark: TypeAlias = "torch.cuda.Event | float"
"""A moment on the device, or seconds on the host."""


class Marked:
    """A Transport that marks when its exchanges begin and end."""

    def __init__(self, inner: Transport, mark: Callable[[], Mark]) -> None:
        self.inner = inner
        self._mark = mark
        self.rank, self.size = inner.rank, inner.size
        self.marks: list[Mark] = []
        self.bytes: list[int] = []

    def exchange(self, sent: Tensor, sent_bytes: Sequence[int], received_bytes: Sequence[int]) -> Tensor:
        self.marks.append(self._mark())
        received = self.inner.exchange(sent, sent_bytes, received_bytes)
        self.marks.append(self._mark())
        self.bytes.append(sent.numel())
        return received

    def gather(self, values: Tensor) -> Tensor:
        return self.inner.gather(values)

    def share_memory(self, bytes_each: int) -> PeerMemory | None:
        return self.inner.share_memory(bytes_each)

    def settle(self) -> None:
        self.inner.settle()

    def close(self) -> None:
        self.inner.close()


class LayerTimer:
    """Dispatch and combine of one layer with `rows` rows a rank, whose experts are drawn evenly. Every rank of the
    group measures at the same time."""

    def __init__(
        self,
        transport: Transport,
        experts: LayerExperts,
        placement: Placement,
        device: torch.device,
        *,
        rows: int,
        mode: DispatchMode,
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._rows, self._mode = rows, mode
        self._transport = Marked(transport, self._now)
        self._experts, self._placement = experts, placement
        self._dispatcher = self._dispatcher_over(self._transport, share_memory=False)
        shape = experts.shape
        generator = torch.Generator(device).manual_seed(rows + transport.rank)
        self._x = torch.randn(rows, shape.width, generator=generator, device=device).to(experts.down.dtype)
        scores = torch.rand(rows, shape.experts, generator=generator, device=device)
        self._ids = scores.argsort(dim=1)[:, : shape.chosen].contiguous()
        self._weights = torch.rand(self._ids.shape, generator=generator, device=device)

    def _dispatcher_over(self, transport: Transport, *, share_memory: bool) -> Dispatcher:
        chosen = self._experts.shape.chosen
        return Dispatcher(transport, rows_limit=self._rows, chosen_max=chosen, share_memory=share_memory)

    def measure(self) -> dict[str, Any]:
        """Medians in microseconds, and bytes that this rank sends, its own share included."""
        dispatch: list[float] = []
        combine: list[float] = []
        whole: list[float] = []
        for _ in range(WARM_UP + REPEATS):
            self._meet()
            self._transport.marks, self._transport.bytes = [self._now()], []
            self._run()
            marks = [*self._transport.marks, self._now()]
            self._wait()
            dispatch.append(self._between(marks[0], marks[-4]))
            combine.append(self._between(marks[-3], marks[-1]))
            whole.append(self._between(marks[0], marks[-1]))
        sent, back = sum(self._transport.bytes[:-1]), self._transport.bytes[-1]
        figures = {
            "rows": self._rows,
            "mode": self._mode.value,
            "dispatch_us": median(dispatch),
            "dispatch_bytes": sent,
            "dispatch_plain_us": self._plain(sent),
            "combine_us": median(combine),
            "combine_bytes": back,
            "combine_plain_us": self._plain(back),
            "layer_us": median(whole),
            "experts_us": self._experts_alone(),
        }
        with_graph = self._on_gpu and self._mode is DispatchMode.LOW_LATENCY and self._rows <= GRAPH_ROWS_MAX
        return figures | (self._replayed(sent, back) if with_graph else {})

    def _run(self) -> Tensor:
        return self._dispatcher.run(
            self._experts, self._placement, self._x, self._ids, self._weights, mode=self._mode, rows_max=self._rows
        )

    def _plain(self, count: int) -> float:
        return self._timed(self._plain_exchange(count))

    def _plain_exchange(self, count: int) -> Callable[[], object]:
        """Of as many bytes as the rank with the most sends."""
        most = int(self._transport.gather(torch.tensor([count])).max())
        each = [-(-most // self._transport.size)] * self._transport.size
        sent = torch.zeros(sum(each), dtype=torch.uint8, device=self._x.device)
        return lambda: self._transport.inner.exchange(sent, each, each)

    def _experts_alone(self) -> float:
        """As many pairs as this rank sends, on its own experts."""
        rows = torch.arange(self._rows, device=self._x.device).repeat_interleave(self._ids.shape[1])
        held, slots = self._experts, self._ids.flatten() % len(self._experts.slots)
        limit, form = held.shape.limit, held.shape.input_format
        return self._timed(
            lambda: expert_outputs(self._x, rows, slots, held.gate_up, held.down, limit=limit, input_format=form)
        )

    def _replayed(self, sent: int, back: int) -> dict[str, Any]:
        """Parts of the layer, and all of it, from CUDA graphs, both ways; and the plain exchanges."""
        figures = self._from_graphs(
            {
                "graph_dispatch_plain_us": self._plain_exchange(sent),
                "graph_combine_plain_us": self._plain_exchange(back),
            }
        )
        for way, share_memory in (("exchange", False), ("memory", True)):
            dispatcher = self._dispatcher_over(self._transport.inner, share_memory=share_memory)
            figures |= {f"graph_{way}_{part}": us for part, us in self._from_graphs(self._parts(dispatcher)).items()}
            figures[f"{way}_shared"] = dispatcher.shares_memory
        return figures

    def _parts(self, dispatcher: Dispatcher) -> dict[str, Callable[[], object]]:
        experts, rows = self._experts, self._rows
        send = partial(dispatcher.send_rows, experts, self._placement, self._x, self._ids, rows_max=rows)
        arrived = send()
        outputs = compute_arrived(experts, arrived)
        absent = len(experts.slots)
        back = partial(dispatcher.return_outputs, arrived, outputs, self._weights, absent=absent)
        whole = partial(
            dispatcher.run, experts, self._placement, self._x, self._ids, self._weights, mode=self._mode, rows_max=rows
        )
        return {"dispatch_us": send, "combine_us": back, "layer_us": whole}

    def _from_graphs(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for name, call in calls.items():
            try:
                graph: torch.cuda.CUDAGraph | None = _recorded(call, times=GRAPH_CALLS)
            except RuntimeError as error:
                figures[name], graph = str(error).splitlines()[0], None
            if int(self._transport.gather(torch.tensor([int(graph is not None)])).min()) == 0 or graph is None:
                break
            figures[name] = round(self._timed(graph.replay) / GRAPH_CALLS, 1)
        return figures

    def _timed(self, call: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(WARM_UP + REPEATS):
            self._meet()
            start = self._now()
            call()
            end = self._now()
            self._wait()
            times.append(self._between(start, end))
        return median(times)

    def _meet(self) -> None:
        self._wait()
        self._transport.gather(torch.zeros(1, dtype=torch.int64))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _now(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(start: Mark, end: Mark) -> float:
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return 1e3 * start.elapsed_time(end)
        assert not isinstance(end, torch.cuda.Event)
        return 1e6 * (end - start)


def _recorded(call: Callable[[], object], *, times: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return graph


def median(values: Sequence[float]) -> float:
    return round(statistics.median(values[WARM_UP:]), 1)
