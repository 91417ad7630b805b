"""python -m whalepod.cluster.jobs.ranks [--config FILE] [--set KEY=VALUE]…

Starts the ranks of a cluster in this job's Ray, and nothing else: Redis is there (redis_url), and routers are processes
of their own that find the ranks by it. Ends when the job is stopped, after draining, or when a rank cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import gettempdir

from rich.console import Console

from whalepod.cluster.config import ClusterConfig
from whalepod.cluster.jobs.job_cluster import add_cluster_arguments, job_config, run_job
from whalepod.cluster.local import STOP_SLACK_S
from whalepod.cluster.pools import RankPools
from whalepod.cluster.ray_runtime import prepare_ray_environment, start_ray, stop_ray
from whalepod.core.errors import ConfigError, UnavailableError

LOOK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m whalepod.cluster.jobs.ranks", description=__doc__)
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)

    async def work() -> int:
        config = job_config(arguments.config, arguments.set, os.environ)
        if config.redis_url is None:
            raise ConfigError("ranks without a cluster of their own register in a Redis: set redis_url")
        await _serve(config, console)
        return 0

    run_job(work, console)


async def _serve(config: ClusterConfig, console: Console) -> None:
    """Until it is cancelled, which is no failure. Raises UnavailableError, ConfigError."""
    loop = asyncio.get_running_loop()
    pools = RankPools(config, secret=config.cluster_secret().text.decode())
    prepare_ray_environment(config)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray") as ray_thread:  # Ray is called from one thread
        try:
            temp_dir = Path(gettempdir())
            await loop.run_in_executor(ray_thread, lambda: start_ray(config, temp_dir=temp_dir, namespace="whalepod"))
            await loop.run_in_executor(ray_thread, pools.start)
            console.print("starting ranks: " + ", ".join(pools.rank_ids))
            while True:
                failures = await loop.run_in_executor(ray_thread, pools.failures)
                for rank_id, reason in failures.items():
                    raise UnavailableError(f"{rank_id} did not start: {reason}")
                for sentence in await loop.run_in_executor(ray_thread, pools.without_places):
                    console.print(sentence)
                await asyncio.sleep(LOOK_S)
        except asyncio.CancelledError:
            console.print("stopping")
            patience_s = config.router.drain_seconds + STOP_SLACK_S
            await loop.run_in_executor(ray_thread, lambda: pools.stop(timeout_s=patience_s))
        finally:
            await loop.run_in_executor(ray_thread, stop_ray)


if __name__ == "__main__":
    main()
