"""python -m whalepod.cluster.jobs.bench [--url URL | --config FILE] [--requests N] [--concurrency N] …

Streams completions of random prompts, so many at a time, and prints what the clients saw; the last line is one JSON
object. The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import json
import os

from rich.console import Console

from whalepod.cluster.jobs.job_cluster import add_cluster_arguments, cluster_url, job_config, run_job

from .load import LoadOptions, figures, run_load


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m whalepod.cluster.jobs.bench", description=__doc__)
    defaults = LoadOptions()
    parser.add_argument("--url", help="a cluster that serves; default: one of its own, while the job runs")
    for name, what in (
        ("requests", "requests in all"),
        ("concurrency", "requests at a time"),
        ("prompt_tokens", "tokens of each prompt"),
        ("answer_tokens", "tokens of each answer"),
        ("seed", "the same seed gives the same prompts"),
    ):
        flag, default = f"--{name.replace('_', '-')}", getattr(defaults, name)
        parser.add_argument(flag, type=int, default=default, help=f"{what}; default {default}")
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.concurrency, arguments.prompt_tokens, arguments.answer_tokens) < 1:
        parser.error("requests, concurrency and tokens must be at least 1")
    console = Console(highlight=False, soft_wrap=True)
    options = LoadOptions(
        requests=arguments.requests,
        concurrency=arguments.concurrency,
        prompt_tokens=arguments.prompt_tokens,
        answer_tokens=arguments.answer_tokens,
        seed=arguments.seed,
    )

    async def work() -> int:
        config = lambda: job_config(arguments.config, arguments.set, os.environ)  # noqa: E731
        async with cluster_url(arguments.url, config, say=console.print) as url:
            console.print(f"{os.cpu_count()} cores here, load {os.getloadavg()[0]:.1f}; {options}")
            seen, seconds = await run_load(url, options, console=console)
        for error in sorted({each.error for each in seen if each.error})[:5]:
            console.print(f"failed: {error}")
        measured = figures(seen, seconds)
        console.print(json.dumps(measured))
        return 1 if measured["failed"] else 0

    run_job(work, console)


if __name__ == "__main__":
    main()
