"""Faults on purpose, for staging: a process that dies, stands still, or whose store is slow or spoils what is written.

    whalepod fault … ── FaultOrder, signed ──▶ FaultService of a process ──▶ the process, or FaultSwitch ──▶ its store

Off unless `fault_injection` is on; then too, only who knows the cluster secret can use it, and an order is good once
and for a minute. Each fault ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError

from whalepod.core.clock import Clock, Deadline
from whalepod.core.credentials import ClusterSecret, Purpose
from whalepod.core.errors import AuthenticationError, InvalidFieldError, ServingError
from whalepod.kvstore.transport import (
    Asked,
    MadeValues,
    Place,
    Renewal,
    ValueSinks,
    ValuesToWrite,
    ValueToWrite,
    ValueTransport,
    Written,
)
from whalepod.rpc.fault.v1 import fault_pb2, fault_pb2_grpc

from .error_codes import status_of_error

log = logging.getLogger(__name__)

ORDER_AGE_MS_MAX = 60_000
DURATION_MS_MAX = 600_000
REPLY_S = 0.05
"""Before a process dies or stands still, so that whoever ordered it hears that it will."""


class FaultSwitch:
    """Which faults are on. Thread-safe."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._delay_s = 0.0
        self._delayed = Deadline.after(0, clock)
        self._corrupting = Deadline.after(0, clock)

    def delay_store(self, delay_s: float, *, seconds: float) -> None:
        self._delay_s, self._delayed = delay_s, Deadline.after(seconds, self._clock)

    def corrupt_writes(self, *, seconds: float) -> None:
        self._corrupting = Deadline.after(seconds, self._clock)

    @property
    def store_delay_s(self) -> float:
        return 0.0 if self._delayed.expired else self._delay_s

    @property
    def corrupts_writes(self) -> bool:
        return not self._corrupting.expired


class FaultyStore:
    """A transport that is as slow and as faithless as the switch says."""

    def __init__(self, transport: ValueTransport, switch: FaultSwitch) -> None:
        self._transport = transport
        self._switch = switch

    @property
    def shards(self) -> Sequence[Place]:
        return self._transport.shards

    def shard_of(self, key: bytes) -> Place:
        return self._transport.shard_of(key)

    def exists(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bool] | None:
        self._linger(deadline)
        return self._transport.exists(shard, keys, deadline=deadline)

    def ask(self, keys: Sequence[bytes]) -> Asked | None:
        return None if self._switch.store_delay_s else self._transport.ask(keys)

    def read(
        self,
        shard: Place,
        sinks: ValueSinks,
        *,
        value_bytes: int,
        renewals: Sequence[Renewal] = (),
        deadline: Deadline,
    ) -> bool:
        self._linger(deadline)
        return self._transport.read(shard, sinks, value_bytes=value_bytes, renewals=renewals, deadline=deadline)

    def write(self, shard: Place, values: ValuesToWrite, *, only_if_absent: bool, deadline: Deadline) -> list[Written]:
        self._linger(deadline)
        if self._switch.corrupts_writes:
            values = MadeValues([_spoilt(values[item]) for item in range(len(values.keys))])
        return self._transport.write(shard, values, only_if_absent=only_if_absent, deadline=deadline)

    def heads(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> list[bytes] | None:
        self._linger(deadline)
        return self._transport.heads(shard, keys, deadline=deadline)

    def replace_if(self, shard: Place, value: ValueToWrite, *, head: bytes, deadline: Deadline) -> bool:
        self._linger(deadline)
        return self._transport.replace_if(shard, value, head=head, deadline=deadline)

    def delete_if(self, shard: Place, key: bytes, *, head: bytes, value_bytes: int, deadline: Deadline) -> bool:
        self._linger(deadline)
        return self._transport.delete_if(shard, key, head=head, value_bytes=value_bytes, deadline=deadline)

    def renew(self, shard: Place, renewals: Sequence[Renewal], *, deadline: Deadline) -> bool:
        self._linger(deadline)
        return self._transport.renew(shard, renewals, deadline=deadline)

    def unlink(self, shard: Place, keys: Sequence[bytes], *, deadline: Deadline) -> int:
        self._linger(deadline)
        return self._transport.unlink(shard, keys, deadline=deadline)

    def close(self) -> None:
        self._transport.close()

    def _linger(self, deadline: Deadline) -> None:
        delay_s = self._switch.store_delay_s
        if delay_s:
            threading.Event().wait(min(delay_s, deadline.remaining_s()))


class FaultServicer(fault_pb2_grpc.FaultServiceServicer):
    """Takes orders for one process: a rank, the `router`, or the `kv` service."""

    name = fault_pb2.DESCRIPTOR.services_by_name["FaultService"].full_name

    def __init__(self, name: str, switch: FaultSwitch | None, *, secret: ClusterSecret, clock: Clock) -> None:
        """`name`: what orders for it say. `switch` None: it writes nothing to the store, and waits for none."""
        log.warning("this process takes orders of `whalepod fault` (fault_injection): not for production")
        self._name = name
        self._switch = switch
        self._secret = secret
        self._clock = clock
        self._done: set[bytes] = set()

    def register(self, server: grpc.aio.Server) -> None:
        fault_pb2_grpc.add_FaultServiceServicer_to_server(self, server)

    async def Inject(  # noqa: N802  the RPC's name
        self,
        request: fault_pb2.InjectRequest,
        context: grpc.aio.ServicerContext[fault_pb2.InjectRequest, fault_pb2.InjectResponse],
    ) -> fault_pb2.InjectResponse:
        try:
            self._begin(self._believed_or_raise(request))
        except ServingError as error:
            status, message, metadata = status_of_error(error)
            await context.abort(status, message, metadata)
        return fault_pb2.InjectResponse()

    def _believed_or_raise(self, request: fault_pb2.InjectRequest) -> fault_pb2.FaultOrder:
        """Raises AuthenticationError, and InvalidFieldError on an order that makes no sense."""
        if not self._secret.verifies(Purpose.FAULT, request.order, request.mac):
            raise AuthenticationError("the order is not signed with this cluster's secret")
        try:
            order = fault_pb2.FaultOrder.FromString(request.order)
        except DecodeError:
            raise AuthenticationError("the order cannot be parsed") from None
        if order.rank_id != self._name:
            raise AuthenticationError(f"the order is for {order.rank_id}, this is {self._name}")
        if abs(self._clock.unix_ms() - order.time_unix_ms) > ORDER_AGE_MS_MAX or request.mac in self._done:
            raise AuthenticationError("the order is too old, or was carried out before")
        if order.duration_ms > DURATION_MS_MAX:
            raise InvalidFieldError("duration_ms", f"a fault lasts at most {DURATION_MS_MAX // 1000} s")
        self._done.add(request.mac)
        return order

    def _begin(self, order: fault_pb2.FaultOrder) -> None:
        """Raises InvalidFieldError."""
        seconds, loop = order.duration_ms / 1000, asyncio.get_running_loop()
        log.critical("a fault was ordered", extra={"kind": fault_pb2.FaultKind.Name(order.kind), "seconds": seconds})
        match order.kind:
            case fault_pb2.FAULT_KIND_KILL:
                loop.call_later(REPLY_S, os.kill, os.getpid(), signal.SIGKILL)
            case fault_pb2.FAULT_KIND_PAUSE:
                loop.call_later(REPLY_S, _pause, os.getpid(), seconds)
            case fault_pb2.FAULT_KIND_DELAY if self._switch is not None:
                self._switch.delay_store(order.delay_ms / 1000, seconds=seconds)
            case fault_pb2.FAULT_KIND_CORRUPT if self._switch is not None:
                self._switch.corrupt_writes(seconds=seconds)
            case fault_pb2.FAULT_KIND_DELAY | fault_pb2.FAULT_KIND_CORRUPT:
                raise InvalidFieldError("kind", f"{self._name} stores nothing: kill or pause it")
            case _:
                raise InvalidFieldError("kind", "unknown kind of fault")


def sign_order(order: fault_pb2.FaultOrder, secret: ClusterSecret) -> fault_pb2.InjectRequest:
    payload = order.SerializeToString()
    return fault_pb2.InjectRequest(order=payload, mac=secret.mac(Purpose.FAULT, payload))


def _pause(pid: int, seconds: float) -> None:
    """Stop a process, and have a helper of its own let it go on."""
    script = f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)


def _spoilt(value: ValueToWrite) -> ValueToWrite:
    """One bit of its last byte is another."""
    *pieces, last = value.pieces
    changed = bytearray(last)
    if changed:
        changed[-1] ^= 1
    return ValueToWrite(value.key, (*pieces, bytes(changed)), value.life_ms)
