"""`whalepod kv`: look at the store, purge it, play its faults, or run the service that looks after it."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import redis.asyncio as aioredis
import typer
import uvloop
from rich.console import Console

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.purge_epochs import note_removed, raise_epoch
from whalepod.cluster.registration_store import connect_registry
from whalepod.cluster.store_connection import store_settings
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.kvstore.caretaker import Caretaker, Stats, owned_by
from whalepod.kvstore.fault_check import check_faults
from whalepod.kvstore.faults import StoreFault
from whalepod.kvstore.server_check import check_servers, server_info
from whalepod.kvstore.store_keys import owner_tag
from whalepod.kvstore.survey import StoredBlock
from whalepod.services.kv.process import run_kv_service

from .cluster_options import with_cluster_config, with_known_cluster

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

EXIT_FAILED = 1

T = TypeVar("T")


@app.command()
@with_cluster_config
def serve(config: ClusterConfig) -> None:
    """Run the KV service: stats, purges, quotas and eviction over gRPC, until SIGTERM."""
    uvloop.run(_serve(config))


@app.command()
@with_known_cluster
def stat(config: ClusterConfig) -> None:
    """Show what the store holds and how full its servers are."""
    console = _console()
    settings = store_settings(config, secret=None)
    for address in settings.addresses:
        info = server_info(address, deadline=Deadline.after(2.0))
        if info is None:
            console.print(f"{address}: does not answer")
            raise typer.Exit(EXIT_FAILED)
        share = (
            f", {info.memory_bytes_used / info.memory_bytes_max:.0%} full" if info.memory_bytes_max else ", no limit"
        )
        console.print(
            f"{address}: redis {info.version}, {info.policy}, {_mib(info.memory_bytes_used)}{share}, "
            f"fragmentation {info.fragmentation:.2f}"
        )
    stats = _asked(config, lambda caretaker: caretaker.stats())
    console.print(
        f"{stats.blocks} blocks, {_mib(stats.block_bytes)}; rows of {stats.images} images, "
        f"{_mib(stats.image_bytes)}; {stats.snapshots} snapshots"
    )
    for line in _owner_lines(stats):
        console.print(line)


@app.command(name="ls")
@with_known_cluster
def list_blocks(
    config: ClusterConfig,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Blocks to show at most.")] = 50,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's.")] = None,
) -> None:
    """List stored blocks: hash, parent, owner, writer, bytes, seconds left. Never what is in them."""
    console, owner = _console(), owner_tag(tenant) if tenant else None
    blocks = [
        block
        for block in _asked(config, lambda caretaker: caretaker.blocks())
        if not block.is_image and (owner is None or block.owner == owner)
    ]
    for block in sorted(blocks, key=lambda block: -block.left_ms)[:limit]:
        console.print(
            f"{block.hash.hex()[:16]} parent {block.parent.hex()[:16]} owner {block.owner:016x} "
            f"writer {block.writer:016x} {block.value_bytes} B {block.left_ms // 1000} s"
        )
    console.print(f"{len(blocks)} blocks")


@app.command()
@with_known_cluster
def purge(
    config: ClusterConfig,
    tenant: Annotated[str | None, typer.Option("--tenant", help="All that this tenant has stored.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="All of a namespace, 32 hex digits.")] = None,
    writer: Annotated[str | None, typer.Option("--writer", help="All of one process, 16 hex digits.")] = None,
) -> None:
    """Remove what one tenant, one model's namespace, or one process has stored."""
    chosen = [name for name, value in (("tenant", tenant), ("namespace", namespace), ("writer", writer)) if value]
    if len(chosen) != 1:
        raise typer.BadParameter("name one of --tenant, --namespace and --writer")
    doomed = _doomed(tenant, namespace, writer)
    if not tenant:
        removed = _asked(config, lambda caretaker: caretaker.purge(doomed))
    else:
        now_unix_ms = SYSTEM_CLOCK.unix_ms()
        epoch = asyncio.run(_write_down(config, lambda registry: raise_epoch(registry, tenant, now_unix_ms)))
        removed = _asked(config, lambda caretaker: caretaker.purge(doomed))
        asyncio.run(_write_down(config, lambda registry: note_removed(registry, tenant, epoch)))
    _console().print(f"{removed} blocks and images removed")


@app.command()
@with_known_cluster
def check(
    config: ClusterConfig,
    faults: Annotated[bool, typer.Option("--faults", help="Play the failure table, without a server.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Cases of each fault.")] = 30,
) -> None:
    """Check that the servers are set up as the settings say; with --faults, that no fault gives a wrong byte."""
    console = _console()
    if not faults:
        check_servers(store_settings(config, secret=None), policy=config.kv.maxmemory_policy)
        console.print("the store is set up as the settings say")
        return
    logging.getLogger("whalepod.kvstore").setLevel(logging.CRITICAL)  # what it would log is what is being played
    report = check_faults(seeds=seeds)
    console.print(f"{report.calls} calls, {report.blocks_hit} blocks hit, {report.faults} wrong values refused")
    console.print(json.dumps({"cases": report.cases, "wrong": report.wrong, "late": report.late}))
    if report.wrong or report.late or not report.blocks_hit:
        raise typer.Exit(EXIT_FAILED)


async def _serve(config: ClusterConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_kv_service(config, stop=stop)


def _doomed(tenant: str | None, namespace: str | None, writer: str | None) -> Callable[[StoredBlock], bool]:
    if tenant:
        return owned_by([owner_tag(tenant)])
    try:
        if namespace:
            wanted = bytes.fromhex(namespace)
            return lambda block: block.namespace == wanted
        incarnation = int(writer or "", 16)
    except ValueError:
        raise typer.BadParameter("namespaces and writers are hexadecimal numbers") from None
    return lambda block: block.writer == incarnation


async def _write_down(config: ClusterConfig, write: Callable[[aioredis.Redis], Awaitable[T]]) -> T:
    registry = connect_registry(config.redis_url_or_embedded)
    try:
        return await write(registry)
    finally:
        await registry.aclose()


def _asked(config: ClusterConfig, question: Callable[[Caretaker], T]) -> T:
    addresses = store_settings(config, secret=None).addresses
    caretaker = Caretaker(addresses, name="cli", quota_bytes=None, clock=SYSTEM_CLOCK, cluster=config.kv.cluster)
    try:
        return question(caretaker)
    except StoreFault as fault:
        _console().print(f"the store does not answer: {fault}")
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        caretaker.close()


def _owner_lines(stats: Stats) -> list[str]:
    owners = sorted(stats.owners.items(), key=lambda pair: -pair[1])[:20]
    return [f"  owner {owner:016x}: {_mib(size)}" for owner, size in owners]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)
