"""Faults on purpose: only with the secret, once, and each for as long as it was ordered."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import psutil
import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from whalepod.cluster.embedded_redis import EmbeddedRedis, EmbeddedRedisSettings
from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.fault_switch import FaultServicer, FaultSwitch, FaultyStore, sign_order
from whalepod.cluster.store_faults import corrupt_store, kill_store, pause_store
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import AuthenticationError, InvalidFieldError, UnavailableError
from whalepod.kvstore.transport import MadeValues, Place, ValuesToWrite, ValueToWrite, ValueTransport, Written
from whalepod.rpc.fault.v1 import fault_pb2, fault_pb2_grpc

SECRET = ClusterSecret(b"the secret of these faults")


def order(**fields: Any) -> fault_pb2.FaultOrder:
    known: dict[str, Any] = {
        "rank_id": "decode-0",
        "kind": fault_pb2.FAULT_KIND_DELAY,
        "duration_ms": 60_000,
        "delay_ms": 50,
    }
    known |= {"time_unix_ms": SYSTEM_CLOCK.unix_ms(), **fields}
    return fault_pb2.FaultOrder(**known)


@asynccontextmanager
async def serving(switch: FaultSwitch | None, *, name: str = "decode-0") -> AsyncGenerator[Any]:
    """A stub to a process that takes orders: this one."""
    server = grpc.aio.server()
    FaultServicer(name, switch, secret=SECRET, clock=SYSTEM_CLOCK).register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield fault_pb2_grpc.FaultServiceStub(channel)
    await server.stop(None)


async def test_an_order_is_carried_out_once_and_only_with_the_secret_for_this_rank_and_now() -> None:
    switch = FaultSwitch(clock=SYSTEM_CLOCK)
    async with serving(switch) as stub:
        good = sign_order(order(), SECRET)
        hour = 3_600_000
        refused = {
            "forged": sign_order(order(), ClusterSecret(b"another secret, as long")),
            "another rank's": sign_order(order(rank_id="decode-1"), SECRET),
            "old": sign_order(order(time_unix_ms=SYSTEM_CLOCK.unix_ms() - hour), SECRET),
        }
        for name, request in refused.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Inject(request)
            assert isinstance(error_from_rpc(caught.value), AuthenticationError), name
        assert switch.store_delay_s == 0
        await stub.Inject(good)
        assert switch.store_delay_s == 0.05
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Inject(good)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Inject(sign_order(order(duration_ms=hour), SECRET))
        assert isinstance(error_from_rpc(caught.value), InvalidFieldError)


async def test_a_process_that_stores_nothing_says_so() -> None:
    async with serving(None, name="router") as stub:
        for kind in (fault_pb2.FAULT_KIND_DELAY, fault_pb2.FAULT_KIND_CORRUPT):
            with pytest.raises(grpc.aio.AioRpcError, match="router stores nothing"):
                await stub.Inject(sign_order(order(rank_id="router", kind=kind), SECRET))


def test_a_store_is_paused_rots_and_dies(tmp_path: Path) -> None:
    settings = EmbeddedRedisSettings(port=free_port(), memory_bytes=16 << 20, directory=tmp_path)
    with EmbeddedRedis(settings), redis.Redis(port=settings.port) as client:
        urls = [f"redis://127.0.0.1:{settings.port}/0"]
        client.set("b:{run}:one", b"value", px=60_000)
        client.set("t:{run}:one", b"window")
        assert corrupt_store(urls) == 1
        assert (client.get("b:{run}:one"), client.get("t:{run}:one")) == (b"valud", b"window")
        left_ms = client.pttl("b:{run}:one")
        assert isinstance(left_ms, int)
        assert 0 < left_ms <= 60_000
        began_s = SYSTEM_CLOCK.monotonic_s()
        pause_store(urls, seconds=0.2)
        client.ping()
        assert SYSTEM_CLOCK.monotonic_s() - began_s > 0.15
        kill_store(urls)
        assert redis.Redis(port=settings.port, retry=Retry(ConstantBackoff(0.05), 100)).dbsize() == 0, (
            "it came back empty"
        )
    with pytest.raises(UnavailableError):
        kill_store(urls)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class KeepingTransport:
    """Keeps what is written; nothing else is asked of it here."""

    def __init__(self) -> None:
        self.written: list[ValueToWrite] = []

    def write(self, shard: Place, values: ValuesToWrite, *, only_if_absent: bool, deadline: Deadline) -> list[Written]:
        del shard, only_if_absent, deadline
        count = len(values.keys)
        self.written += [values[item] for item in range(count)]
        return [Written.STORED] * count


def test_a_corrupting_store_changes_one_bit_of_each_value_while_the_fault_lasts() -> None:
    kept, switch = KeepingTransport(), FaultSwitch(clock=SYSTEM_CLOCK)
    store = FaultyStore(cast("ValueTransport", kept), switch)
    value = ValueToWrite(b"key", (b"head", b"payload"), life_ms=1000)
    nowhere = cast("Place", None)
    store.write(nowhere, MadeValues([value]), only_if_absent=False, deadline=Deadline.after(1))
    switch.corrupt_writes(seconds=60)
    store.write(nowhere, MadeValues([value]), only_if_absent=False, deadline=Deadline.after(1))
    switch.corrupt_writes(seconds=0)
    store.write(nowhere, MadeValues([value]), only_if_absent=False, deadline=Deadline.after(1))
    assert [each.pieces for each in kept.written] == [value.pieces, (b"head", b"payloae"), value.pieces]


def test_a_slow_store_takes_its_time_but_not_more_than_the_call_has() -> None:
    kept, switch = KeepingTransport(), FaultSwitch(clock=SYSTEM_CLOCK)
    store = FaultyStore(cast("ValueTransport", kept), switch)
    switch.delay_store(30.0, seconds=60)
    began_s = SYSTEM_CLOCK.monotonic_s()
    store.write(cast("Place", None), MadeValues([]), only_if_absent=False, deadline=Deadline.after(0.05))
    assert 0.04 < SYSTEM_CLOCK.monotonic_s() - began_s < 5


SERVE = """
import asyncio, sys
from tests.cluster.test_fault_switch import SECRET
from whalepod.cluster.fault_switch import FaultServicer, FaultSwitch
from whalepod.core.clock import SYSTEM_CLOCK
import grpc

async def main():
    server = grpc.aio.server()
    FaultServicer("decode-0", FaultSwitch(clock=SYSTEM_CLOCK), secret=SECRET, clock=SYSTEM_CLOCK).register(server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


async def test_a_process_stands_still_for_a_while_and_dies_when_told() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVE, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = int(await process.stdout.readline())
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = fault_pb2_grpc.FaultServiceStub(channel)
            await stub.Inject(sign_order(order(kind=fault_pb2.FAULT_KIND_PAUSE, duration_ms=400), SECRET))
            seen: set[str] = set()
            async with asyncio.timeout(10):
                while not {psutil.STATUS_STOPPED, psutil.STATUS_SLEEPING} <= seen:
                    seen.add(psutil.Process(process.pid).status())
                    await asyncio.sleep(0.02)
            await stub.Inject(sign_order(order(kind=fault_pb2.FAULT_KIND_KILL), SECRET))
            async with asyncio.timeout(10):
                assert await process.wait() == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
