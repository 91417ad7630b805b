"""python -m whalepod.cluster.jobs.serve [--config FILE] [--set KEY=VALUE]…

Starts a cluster in this job's Ray and serves until the job is stopped, which ends the cluster and is no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from rich.console import Console

from whalepod.cluster.jobs.job_cluster import add_cluster_arguments, job_config, run_job
from whalepod.cluster.local import running_cluster

LOOK_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m whalepod.cluster.jobs.serve", description=__doc__)
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)

    async def work() -> int:
        config = job_config(arguments.config, arguments.set, os.environ)
        async with running_cluster(config, say=console.print) as cluster:
            console.print(f"serving at {cluster.http_url}")
            try:
                while True:
                    await cluster.raise_failure()
                    await asyncio.sleep(LOOK_S)
            except asyncio.CancelledError:
                console.print("stopping")
        return 0

    run_job(work, console)


if __name__ == "__main__":
    main()
