"""`whalepod fault`: make a rank misbehave, to see what its cluster does. For staging."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Annotated, Any

import grpc
import typer
from rich.console import Console

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.error_codes import error_from_rpc
from whalepod.cluster.fault_switch import sign_order
from whalepod.cluster.peer_tls import PeerTls, open_channel
from whalepod.cluster.registry import RegistryWatcher
from whalepod.core.clock import SYSTEM_CLOCK
from whalepod.core.ids import RankId
from whalepod.rpc.fault.v1 import fault_pb2, fault_pb2_grpc

from .cluster_options import with_cluster_config
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


@with_cluster_config
def fault(
    config: ClusterConfig,
    kind: Annotated[Kind, typer.Argument(help="kill; pause the process; delay its store; corrupt what it stores")],
    rank: Annotated[str, typer.Argument(help="For example decode-0, as `whalepod status` says.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long it lasts.")] = 5.0,
    delay_ms: Annotated[int, typer.Option(min=1, max=60_000, help="delay: what each call to the store takes.")] = 200,
) -> None:
    """Make a rank misbehave. Only where ranks run with `--fault-injection`."""
    console = Console(highlight=False, soft_wrap=True)
    config = served_here_unless_named(config, console)
    order = fault_pb2.FaultOrder(
        rank_id=rank,
        kind=KINDS[kind],
        duration_ms=int(1000 * seconds),
        delay_ms=delay_ms,
        time_unix_ms=SYSTEM_CLOCK.unix_ms(),
    )
    refusal = asyncio.run(_order(config, RankId(rank), order))
    if refusal is not None:
        console.print(f"whalepod: {refusal}")
        raise typer.Exit(1)
    console.print(f"{kind.value} of {rank} has begun")


async def _order(config: ClusterConfig, rank: RankId, order: fault_pb2.FaultOrder) -> str | None:
    """None: it has begun; else why not."""
    secret, tls = config.cluster_secret(), PeerTls.of(config.tls)
    watcher = RegistryWatcher(redis_url=config.redis_url_or_embedded, secret=secret, tls=tls)
    try:
        await watcher.poll()
        ranks = watcher.ranks
    finally:
        await watcher.stop()
    if rank not in ranks:
        return f"there is no rank {rank}; there are {', '.join(sorted(ranks)) or 'none'}"
    async with open_channel(ranks[rank].address, tls) as channel:
        stub: Any = fault_pb2_grpc.FaultServiceStub(channel)
        try:
            await stub.Inject(sign_order(order, secret), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
                return f"{rank} takes no faults: start it with --fault-injection (WHALEPOD_FAULT_INJECTION)"
            return str(error_from_rpc(failure))
    return None
