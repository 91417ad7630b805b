"""`whalepod fault`: make a process misbehave, to see what its cluster does. For staging."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from whalepod.cluster.config import ClusterConfig, join_address
from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.fault_switch import sign_order
from whalepod.cluster.peer_tls import PeerTls, open_channel
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.registry import RegistryWatcher
from whalepod.cluster.router_channel import open_router_channel
from whalepod.cluster.store_faults import corrupt_store, kill_store, pause_store
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.errors import UnavailableError
from whalepod.core.ids import RankId
from whalepod.rpc.fault.v1 import fault_pb2, fault_pb2_grpc

from .cluster_options import with_known_cluster
from .status import served_here_unless_named

TIMEOUT_S = 5.0


class Kind(StrEnum):
    KILL = "kill"
    DELAY = "delay"
    CORRUPT = "corrupt"
    PAUSE = "pause"


KINDS: dict[Kind, fault_pb2.FaultKind] = {
    Kind.KILL: fault_pb2.FAULT_KIND_KILL,
    Kind.DELAY: fault_pb2.FAULT_KIND_DELAY,
    Kind.CORRUPT: fault_pb2.FAULT_KIND_CORRUPT,
    Kind.PAUSE: fault_pb2.FAULT_KIND_PAUSE,
}


@with_known_cluster
def fault(
    config: ClusterConfig,
    kind: Annotated[Kind, typer.Argument(help="kill; pause the process; delay its store; corrupt what it stores")],
    target: Annotated[str, typer.Argument(help="A rank as `whalepod status` names it, router, kv, or redis.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long it lasts.")] = 5.0,
    delay_ms: Annotated[int, typer.Option(min=1, max=60_000, help="delay: what each call to the store takes.")] = 200,
) -> None:
    """Make a process misbehave. Only where processes run with `--fault-injection`."""
    console = Console(highlight=False, soft_wrap=True)
    config = served_here_unless_named(config, console)
    if target == "redis":
        refusal = _order_redis(config, kind, seconds)
    else:
        refusal = asyncio.run(_order(config, target, _fault_order(target, kind, seconds, delay_ms)))
    if refusal is not None:
        console.print(f"whalepod: {refusal}")
        raise typer.Exit(1)
    console.print(f"{kind.value} of {target} has begun")


def _fault_order(target: str, kind: Kind, seconds: float, delay_ms: int) -> fault_pb2.FaultOrder:
    return fault_pb2.FaultOrder(
        rank_id=target,
        kind=KINDS[kind],
        duration_ms=int(1000 * seconds),
        delay_ms=delay_ms,
        time_unix_ms=SYSTEM_CLOCK.unix_ms(),
    )


def _order_redis(config: ClusterConfig, kind: Kind, seconds: float) -> str | None:
    """As `_order`."""
    if not config.fault_injection:
        return "redis takes no faults: set fault_injection (WHALEPOD_FAULT_INJECTION), as its cluster has"
    try:
        match kind:
            case Kind.KILL:
                kill_store(config.kv_urls)
            case Kind.PAUSE:
                pause_store(config.kv_urls, seconds=seconds)
            case Kind.CORRUPT:
                if not corrupt_store(config.kv_urls):
                    return "there is no block in the store"
            case Kind.DELAY:
                return "redis is slow to whoever asks it: delay a rank instead"
    except UnavailableError as error:
        return str(error)
    return None


async def _order(config: ClusterConfig, target: str, order: fault_pb2.FaultOrder) -> str | None:
    """None: it has begun; else why not."""
    tls = PeerTls.of(config.tls)
    if target == "router":
        opened = open_router_channel(config)
    elif target == "kv":
        opened = open_channel(join_address(config.reachable_host, config.kv.port), tls)
    else:
        ranks = await _ranks(config, tls)
        if RankId(target) not in ranks:
            return f"there is no rank {target}; there are {', '.join((*sorted(ranks), 'router', 'kv', 'redis'))}"
        opened = open_channel(ranks[RankId(target)].address, tls)
    async with opened as channel:
        stub: Any = fault_pb2_grpc.FaultServiceStub(channel)
        try:
            await stub.Inject(sign_order(order, config.cluster_secret()), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                return f"{target} takes no faults: start it with --fault-injection (WHALEPOD_FAULT_INJECTION)"
            return f"{target} did not take the order: {error_from_rpc(failure)}"
    return None


async def _ranks(config: ClusterConfig, tls: PeerTls | None) -> Mapping[RankId, RankInfo]:
    watcher = RegistryWatcher(redis_url=config.redis_url_or_embedded, secret=config.cluster_secret(), tls=tls)
    try:
        await watcher.poll()
        return watcher.ranks
    finally:
        await watcher.stop()
