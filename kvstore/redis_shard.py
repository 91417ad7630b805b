"""One Redis server: a few connections, a breaker, and a thread that keeps both in order.

    exchange ──▶ take an idle connection ──▶ talk ──▶ give it back
                        ▲                     └─ StoreFault: close it, count it, answer None
                     keeper: opens what is missing, in its own thread; its handshake is the breaker's probe

Callers never resolve a name, connect or authenticate, so none of these can take their time. While the keeper's last
attempt has failed and nothing is connected, and while the breaker is open, the answer is None at once.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import NamedTuple, TypeVar

from whalepod.core.clock import Clock, Deadline

from . import metrics
from .breaker import Breaker
from .faults import ErrorReply, FaultReason, Meaning, StoreFault, code_label, meaning_of, raise_if_server_wide
from .resp import Reply, RespConnection, command
from .settings import StoreAddress, StoreSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

Greeting = Callable[[RespConnection, Deadline], None]
"""Raises StoreFault if the server is not who it should be."""

BACKOFF_S = 0.05
FAIR_CHANCE_S = 0.05
"""A timeout shorter than this says more about its caller than about the server."""
PROBE_KEY = b"b:{probe}:"
"""Inside the key patterns that a restricted user may read."""
CORRUPT_MAX = 3
"""More wrong values than this within `CORRUPT_WINDOW_S`, and the server is bypassed for as long (`kvstore.md` F17)."""
CORRUPT_WINDOW_S = 60.0
SPEED_SHARE = 0.2
"""Weight of the newest transfer in the estimate of a server's speed."""
SPEED_LIFE_S = 10.0
"""An estimate older than this is none: somebody has to ask a slow server again to see that it is quick."""
SPEED_BYTES_MIN = 64 << 10
"""A smaller transfer says more about latency."""


class Lane(Enum):
    """Small commands never wait behind values."""

    CONTROL = "control"
    DATA = "data"


class Lease(NamedTuple):
    """Connections that nobody else uses. Handed to `exchange`, or to `drop`."""

    connections: Sequence[RespConnection]
    generation: int


class Shard:
    """Connections to one server. Thread-safe. Reconnects by itself until `close`."""

    def __init__(
        self,
        address: StoreAddress,
        settings: StoreSettings,
        *,
        jitter: Random,
        clock: Clock,
        greet: Greeting | None = None,
    ) -> None:
        """`greet` is what a new connection says first, before the credentials in the address."""
        self.name = str(address)
        self._greet = greet
        self._address = address
        self._settings = settings
        self._jitter = jitter
        self._clock = clock
        self._lock = threading.Lock()
        self._returned = {lane: threading.Condition(self._lock) for lane in Lane}
        self._vacated = threading.Condition(self._lock)
        self._capacity = {Lane.CONTROL: 1, Lane.DATA: settings.data_connections}
        self._idle: dict[Lane, list[RespConnection]] = {lane: [] for lane in Lane}
        self._in_use = dict.fromkeys(Lane, 0)
        self._breaker = Breaker(failures_max=settings.breaker_failures, clock=clock)
        self._attempts_failed = 0
        self._attempt: Deadline | None = None
        self._disabled_by: str | None = None
        self._corrupt_at_s: deque[float] = deque(maxlen=CORRUPT_MAX + 1)
        self._suspect_until_s = float("-inf")
        self._read_bytes_per_s: float | None = None
        self._speed_at_s = float("-inf")
        self._generation = 0
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"kv-keeper {self.name}", daemon=True)
        self._keeper.start()

    @property
    def available(self) -> bool:
        """As far as is known: connected, or not yet known to fail."""
        with self._lock:
            return not self._unusable and (self._attempts_failed == 0 or self._connected)

    @property
    def disabled_by(self) -> str | None:
        with self._lock:
            return self._disabled_by

    @property
    def address(self) -> StoreAddress:
        return self._address

    @property
    def is_local(self) -> bool:
        return self._address.is_local

    def nobody_else(self, lane: Lane, count: int) -> bool:
        """The caller, who has so many connections, is the only one that talks to it here, as far as is known."""
        return self._in_use[lane] <= count

    @property
    def read_bytes_per_s(self) -> float | None:
        fresh = self._clock.monotonic_s() - self._speed_at_s < SPEED_LIFE_S
        return self._read_bytes_per_s if fresh else None

    def note_corrupt(self) -> None:
        """A value from here was wrong. Too many of those, and the server is left alone for a while."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._corrupt_at_s.append(now_s)
            often = len(self._corrupt_at_s) > CORRUPT_MAX and now_s - self._corrupt_at_s[0] <= CORRUPT_WINDOW_S
            if often and now_s >= self._suspect_until_s:
                self._suspect_until_s = now_s + CORRUPT_WINDOW_S
                metrics.SHARDS_SUSPECTED.labels(self.name).inc()
                logger.error("store %s gave %d wrong values in a minute: bypassed", self.name, CORRUPT_MAX + 1)
                self._tell_all()

    def note_read(self, value_bytes: int, seconds: float) -> None:
        """So much was read in so long."""
        if value_bytes >= SPEED_BYTES_MIN and seconds > 0:
            speed, known = value_bytes / seconds, self._read_bytes_per_s
            self._read_bytes_per_s = speed if known is None else known + SPEED_SHARE * (speed - known)
            self._speed_at_s = self._clock.monotonic_s()
            metrics.READ_SPEED.labels(self.name).set(self._read_bytes_per_s)

    def exchange(
        self,
        lane: Lane,
        talk: Callable[[Sequence[RespConnection], Deadline], T],
        *,
        deadline: Deadline,
        value_bytes: int = 0,
        connections_max: int = 1,
        lease: Lease | None = None,
    ) -> T | None:
        """What `talk` returns, or None if there is no connection or it was lost on the way.

        `talk` gets a connection nobody else uses and its own, never later, deadline; of `connections_max` as many as
        are idle. It may raise StoreFault; after any exception the connections are closed. `value_bytes` is what it
        expects to move. `lease`: what was taken before.
        """
        if lease is None:
            lease = None if deadline.expired else self._take(lane, deadline, connections_max)
        if lease is None:
            return None
        allowed_s = self._settings.control_timeout_s
        if lane is Lane.DATA:
            allowed_s = self._settings.data_timeout_s + value_bytes / self._settings.data_bytes_per_s_min
        fair = min(allowed_s, deadline.remaining_s()) >= min(FAIR_CHANCE_S, allowed_s)
        sound = False
        try:
            result = talk(lease.connections, deadline.earlier(allowed_s))
            sound = True
        except StoreFault as fault:
            self._note_fault(fault, counts=fault.reason.counts_against_server and (fair or not _is_timeout(fault)))
            return None
        finally:
            self._give_back(lane, lease, sound=sound)
        return result

    def lend(self, lane: Lane) -> Lease | None:
        """A connection, if one is idle."""
        return self._take(lane, Deadline.after(0, self._clock), 1)

    def drop(self, lane: Lane, lease: Lease, fault: StoreFault) -> None:
        """It is in doubt, and is closed."""
        self._note_fault(fault, counts=False)
        self._give_back(lane, lease, sound=False)

    def close(self) -> None:
        """Idempotent. Connections in use are closed when they come back."""
        self._closing.set()
        with self._lock:
            self._drop_idle()
            self._tell_all()
        if threading.current_thread() is not self._keeper:
            # The keeper may be inside a name lookup, which has no deadline; it is a daemon and holds nothing.
            self._keeper.join(timeout=self._settings.connect_timeout_s)

    @property
    def _unusable(self) -> bool:
        out_of_use = self._closing.is_set() or self._disabled_by is not None or self._breaker.open
        return out_of_use or self._clock.monotonic_s() < self._suspect_until_s

    @property
    def _connected(self) -> bool:
        return any(self._idle.values()) or any(self._in_use.values())

    def _take(self, lane: Lane, deadline: Deadline, count: int) -> Lease | None:
        with self._lock:
            while not self._unusable:
                taken, idle = list[RespConnection](), self._idle[lane]
                while idle and len(taken) < count:
                    connection = idle.pop()
                    if connection.quiet:
                        taken.append(connection)
                    else:
                        self._discard(connection, FaultReason.STALE)
                if taken:
                    self._in_use[lane] += len(taken)
                    return Lease(taken, self._generation)
                if self._in_use[lane]:
                    wait_s = deadline.remaining_s()
                elif self._attempts_failed:
                    return None
                else:
                    attempt_s = self._attempt.remaining_s() if self._attempt else self._settings.connect_timeout_s
                    wait_s = min(deadline.remaining_s(), attempt_s)
                if wait_s <= 0:
                    return None
                self._returned[lane].wait(wait_s)
            return None

    def _give_back(self, lane: Lane, lease: Lease, *, sound: bool) -> None:
        connections = lease.connections
        with self._lock:
            self._in_use[lane] -= len(connections)
            if sound:
                self._breaker.succeed()
            if sound and lease.generation == self._generation and not self._unusable:
                self._idle[lane] += connections
                self._returned[lane].notify(len(connections))
            else:
                for connection in connections:
                    connection.close()
                self._vacated.notify()
                self._tell_all()

    def _tell_all(self) -> None:
        """Whoever waits looks again."""
        for returned in self._returned.values():
            returned.notify_all()

    def _note_fault(self, fault: StoreFault, *, counts: bool) -> None:
        metrics.CONNECTIONS_DISCARDED.labels(fault.reason.value).inc()
        with self._lock:
            if fault.reason is FaultReason.REFUSED:
                self._disable(fault)
            if counts:
                self._fail()
            if self._unusable or fault.reason in (FaultReason.RESET, FaultReason.MOVED):
                # The others were opened to the same server at the same name.
                self._drop_idle()

    def _fail(self) -> None:
        was_open = self._breaker.open
        self._breaker.fail()
        if self._breaker.open and not was_open:
            logger.warning("store %s fails and is not used until it answers again", self.name)

    def _disable(self, fault: StoreFault) -> None:
        if self._disabled_by is None:
            logger.error("store %s refuses this process and is not used any more: %s", self.name, fault.detail)
        self._disabled_by = fault.detail

    def _drop_idle(self) -> None:
        self._generation += 1
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
            connections.clear()
        self._vacated.notify()

    def _discard(self, connection: RespConnection, reason: FaultReason) -> None:
        metrics.CONNECTIONS_DISCARDED.labels(reason.value).inc()
        connection.close()
        self._vacated.notify()

    def _keep(self) -> None:
        while self._wait_for_work():
            began_at_s = self._clock.monotonic_s()
            self._closing.wait(self._pause_s())
            try:
                connection = self._open()
            except StoreFault as fault:
                self._note_attempt_failed(fault)
            else:
                self._note_connected(connection)
            if self._breaker.open:
                metrics.BREAKER_OPEN_SECONDS.labels(self.name).inc(self._clock.monotonic_s() - began_at_s)

    def _wait_for_work(self) -> bool:
        with self._lock:
            while not self._closing.is_set() and self._disabled_by is None:
                if self._vacant_lane() is not None or self._breaker.open:
                    return True
                self._vacated.wait()
            return False

    def _pause_s(self) -> float:
        """How long to leave the server alone before the next attempt: jittered, growing up to the probe's interval."""
        with self._lock:
            pause_s = self._settings.probe_interval_s
            if not self._breaker.open:
                pause_s = min(pause_s, BACKOFF_S * 2 ** (self._attempts_failed - 1)) if self._attempts_failed else 0.0
        return pause_s * self._jitter.uniform(0.5, 1.0)

    def _vacant_lane(self) -> Lane | None:
        for lane in Lane:
            if len(self._idle[lane]) + self._in_use[lane] < self._capacity[lane]:
                return lane
        return None

    def _note_attempt_failed(self, fault: StoreFault) -> None:
        metrics.CONNECTIONS_DISCARDED.labels(fault.reason.value).inc()
        with self._lock:
            if self._attempts_failed == 0:
                logger.warning("cannot connect to store %s: %s", self.name, fault)
            if fault.reason is FaultReason.REFUSED:
                self._disable(fault)
            # Capped, for it is an exponent.
            self._attempts_failed = min(self._attempts_failed + 1, 16)
            self._attempt = None
            self._fail()
            if self._unusable or not all(connection.quiet for idle in self._idle.values() for connection in idle):
                self._drop_idle()
            self._tell_all()

    def _note_connected(self, connection: RespConnection) -> None:
        with self._lock:
            if self._attempts_failed or self._breaker.open:
                logger.info("store %s answers", self.name)
            self._attempts_failed = 0
            self._attempt = None
            if self._breaker.open:
                self._breaker.close()
            lane = self._vacant_lane()
            if lane is None or self._closing.is_set():
                connection.close()
            else:
                self._idle[lane].append(connection)
            self._tell_all()

    def _open(self) -> RespConnection:
        """A connection that has answered a real question. Raises StoreFault."""
        deadline = Deadline.after(self._settings.connect_timeout_s, self._clock)
        with self._lock:
            self._attempt = deadline
        connection = RespConnection.connect(self._address, deadline=deadline)
        try:
            if self._greet is not None:
                self._greet(connection, deadline)
            for words in self._handshake():
                connection.send([command(*words)], deadline=deadline)
                _check_welcome(connection.read_reply(deadline=deadline))
        except BaseException:
            connection.close()
            raise
        return connection

    def _handshake(self) -> list[tuple[bytes, ...]]:
        words: list[tuple[bytes, ...]] = []
        if self._address.password:
            user = (self._address.username.encode(),) if self._address.username else ()
            words.append((b"AUTH", *user, self._address.password.encode()))
        if self._address.database:
            words.append((b"SELECT", b"%d" % self._address.database))
        words.append((b"EXISTS", PROBE_KEY))
        return words


def _is_timeout(fault: StoreFault) -> bool:
    return fault.reason is FaultReason.TIMEOUT


def _check_welcome(reply: Reply) -> None:
    """Raises StoreFault unless the server took a command of the handshake."""
    if not isinstance(reply, ErrorReply) or reply.code == "MOVED":  # a node of a cluster is there, whoever has the slot
        return
    metrics.ERRORS.labels(code_label(reply)).inc()
    raise_if_server_wide(reply)
    if meaning_of(reply) is Meaning.BUG:  # AUTH where no password is set, SELECT out of range, no such command
        raise StoreFault(FaultReason.REFUSED, f"{reply.code} {reply.message}")
    raise StoreFault(FaultReason.UNAVAILABLE, reply.code)
