"""Processes and what lies between them: messages in order within a stream, late, lost with a connection, or repeated.

    a process dies        its connections are reset, or, with its host, fall silent
    a path falls silent   what is on its way waits; both ends give up when no ping is answered, each by itself
    a connection breaks   each side learns of it in its own time
    a call is repeated    as a proxy does that has had no answer

One direction of one call is a lane: what is sent on it arrives in order. Nothing else is in order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import grpc

from tests.simulation.journal import Journal
from whalepod.cluster.grpc_options import CONNECT_TIMEOUT_MS, KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS

SILENCE_S = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000
"""After so long without an answer to a ping, a connection is given up."""
CONNECT_S = CONNECT_TIMEOUT_MS / 1000

APART_S = 1e-6
"""Between two messages of a lane: what is due at the same moment has no order."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How a network behaves without anybody's doing. Seconds of one way."""

    latency_s: tuple[float, float] = (0.0002, 0.001)
    late_rate: float = 0.0
    """Messages that take up to `late_s` longer; those behind them on their lane wait."""
    late_s: float = 0.5
    repeat_rate: float = 0.0
    """Unary calls inside the cluster that are made twice."""
    repeat_s: float = 3.0


class Connected(Protocol):
    """What a path tells its calls: one end learns that the connection is gone."""

    client: Node
    server: Node

    def break_at_client(self, detail: str) -> None: ...

    def break_at_server(self) -> None: ...


@dataclass(eq=False)
class Node:
    """One process, or the next one at the same address."""

    address: str
    alive: bool = True
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = field(default_factory=dict)
    accept: Callable[[], asyncio.Protocol] | None = None
    """Makes the server's end of an HTTP connection; None: it has no HTTP."""
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    """Of calls that it serves."""

    # What servicers expect of a `grpc.aio.Server`.

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The registered ones are the same."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


@dataclass(slots=True, eq=False)
class Lane:
    """One direction of one call."""

    source: Node
    target: Node
    last_at_s: float = 0.0
    waiting: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    """What has come as far as the silence."""


class Network:
    """For one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, draw: Random, weather: Weather, journal: Journal) -> None:
        self.loop = loop
        self.draw = draw
        self.weather = weather
        self.journal = journal
        self._nodes: dict[str, Node] = {}
        self._silent: dict[frozenset[str], float] = {}
        """Paths by their ends' addresses, and since when."""
        self._held: dict[Lane, None] = {}
        self._calls: dict[Connected, None] = {}

    def find(self, address: str) -> Node | None:
        """The process that listens there now."""
        node = self._nodes.get(address)
        return node if node is not None and node.alive else None

    def add(self, node: Node) -> None:
        """A process begins. What its predecessor had is reset: the host answers for it."""
        self._nodes[node.address] = node
        self._forget_silence(node.address)
        for call in list(self._calls):
            if node.address in (call.client.address, call.server.address) and not (
                call.client.alive and call.server.alive
            ):
                self._break(call, "connection reset by a process that was started again")

    def opened(self, call: Connected) -> None:
        self._calls[call] = None

    def closed(self, call: Connected) -> None:
        self._calls.pop(call, None)

    def latency_s(self) -> float:
        weather, draw = self.weather, self.draw
        seconds = draw.uniform(*weather.latency_s)
        return seconds + draw.uniform(0, weather.late_s) if draw.random() < weather.late_rate else seconds

    def carry(self, lane: Lane, arrive: Callable[[], None]) -> None:
        """`arrive` is called at the other end, unless one of both processes is dead by then."""
        if not lane.source.alive:
            return
        lane.last_at_s = max(lane.last_at_s + APART_S, self.loop.time() + self.latency_s())
        self.loop.call_at(lane.last_at_s, self._come, lane, arrive)

    def silence(self, one: str, other: str) -> None:
        """Nothing passes between two addresses any more."""
        path = frozenset((one, other))
        if path not in self._silent:
            since_s = self._silent[path] = self.loop.time()
            self.loop.call_later(SILENCE_S, self._give_up, path, since_s)

    def heal(self, one: str, other: str) -> None:
        """What waited goes on."""
        self._silent.pop(frozenset((one, other)), None)
        for lane in [lane for lane in self._held if not self._is_silent(lane)]:
            del self._held[lane]
            while lane.waiting:
                self._pass_on(lane, lane.waiting.popleft())

    def reset(self, one: str, other: str) -> None:
        """Every connection between them breaks; each side learns of it in its own time."""
        for call in list(self._calls):
            if {call.client.address, call.server.address} == {one, other}:
                self._break(call, "connection reset")

    def kill(self, node: Node, *, with_host: bool) -> None:
        """The process is gone. `with_host`: nobody says so to its peers."""
        node.alive = False
        for task in list(node.tasks):
            task.cancel()
        for call in list(self._calls):
            if node in (call.client, call.server):
                if with_host:
                    self.silence(call.client.address, call.server.address)
                else:
                    self._break(call, "connection reset by peer")

    def is_silent(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._silent

    def _is_silent(self, lane: Lane) -> bool:
        return self.is_silent(lane.source.address, lane.target.address)

    def _come(self, lane: Lane, arrive: Callable[[], None]) -> None:
        if self._is_silent(lane) or lane.waiting:
            self._held[lane] = None
            lane.waiting.append(arrive)
        else:
            self._pass_on(lane, arrive)

    def _pass_on(self, lane: Lane, arrive: Callable[[], None]) -> None:
        if lane.source.alive and lane.target.alive:
            arrive()

    def _give_up(self, path: frozenset[str], since_s: float) -> None:
        """Pings were not answered."""
        if self._silent.get(path) == since_s:
            for call in list(self._calls):
                if frozenset((call.client.address, call.server.address)) == path:
                    self._break(call, "ping timeout")

    def _break(self, call: Connected, detail: str) -> None:
        self.closed(call)
        self.journal.note("breaks", call.client.address, call.server.address, detail)
        self.loop.call_later(self.latency_s(), call.break_at_client, detail)
        self.loop.call_later(self.latency_s(), call.break_at_server)

    def _forget_silence(self, address: str) -> None:
        for path in [path for path in self._silent if address in path]:
            del self._silent[path]
