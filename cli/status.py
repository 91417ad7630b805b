"""`whalepod status`: the ranks of a cluster, as its registry and they themselves say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.config_sources import load_config
from whalepod.cluster.liveness import HealthProber, Liveness
from whalepod.cluster.peer_tls import PeerTls
from whalepod.cluster.registration import RankInfo
from whalepod.cluster.registry import RegistryWatcher
from whalepod.cluster.serve_lock import serving_record

from .cluster_options import with_known_cluster
from .user_dirs import state_dir


@with_known_cluster
def status(config: ClusterConfig) -> None:
    """Show ranks, their load and their health. Without a secret: the cluster that `whalepod serve` started here."""
    console = Console(highlight=False, soft_wrap=True)
    config = served_here_unless_named(config, console)
    ranks, refused, redis_ok = asyncio.run(_look(config))
    if not redis_ok:
        console.print(f"the registry at {config.redis_url_or_embedded} does not answer")
        raise typer.Exit(1)
    for line in _lines(ranks):
        console.print(line)
    for name, reason in refused.items():
        console.print(f"refused {name}: {reason}")
    if not ranks or any(liveness is not Liveness.SERVING for _, liveness in ranks):
        raise typer.Exit(1)


def served_here_unless_named(config: ClusterConfig, console: Console) -> ClusterConfig:
    """The settings given, if they hold a secret; else those of the cluster that `whalepod serve` started here."""
    if config.secret is not None or config.secret_file is not None:
        return config
    http_port = config.router.http_port
    record = serving_record(state_dir(), http_port)
    if record is None:
        console.print(
            f"no cluster serves on port {http_port} here. Start one with `whalepod serve`, or name another by "
            "--http-port, or by --redis-url and --secret-file"
        )
        raise typer.Exit(1)
    console.print(f"{record.http_url}, process {record.pid}")
    return load_config(file=Path(record.config_file))


async def _look(config: ClusterConfig) -> tuple[list[tuple[RankInfo, Liveness]], dict[str, str], bool]:
    """Ranks with what they answer, refused registrations, and whether the registry answered."""
    tls = PeerTls.of(config.tls)
    watcher = RegistryWatcher(redis_url=config.redis_url_or_embedded, secret=config.cluster_secret(), tls=tls)
    prober = HealthProber(tls=tls)
    try:
        await watcher.poll()
        ranks = sorted(watcher.ranks.values(), key=lambda rank: rank.rank_id)
        answers = await asyncio.gather(*(prober.probe(rank.address) for rank in ranks))
        return list(zip(ranks, answers, strict=True)), dict(watcher.refused), watcher.redis_ok
    finally:
        await prober.close()
        await watcher.stop()


def _lines(ranks: Sequence[tuple[RankInfo, Liveness]]) -> list[str]:
    """A table: columns as wide as their widest entry, so that it reads the same in a terminal and in a pipe."""
    rows = [("rank", "role", "address", "health", "running", "waiting", "blocks used", "context")]
    for rank, liveness in ranks:
        load = rank.load
        rows.append(
            (
                rank.rank_id,
                rank.role.value,
                rank.address,
                "draining" if rank.draining else liveness.name.lower().replace("_", " "),
                f"{load.running}/{load.slots_total}",
                str(load.waiting),
                f"{load.blocks_total - load.blocks_free}/{load.blocks_total}",
                str(rank.context_tokens_max),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip() for row in rows]
