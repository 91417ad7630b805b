"""python -m whalepod.cluster.jobs.batch --input FILE --output FILE [--url URL | --config FILE] [--set KEY=VALUE]…

Answers every line of a JSONL file (OpenAI's batch form) and writes one line each. Started again after it was killed, it
goes on where it was. The exit code is 0 if every answer has status 200, 1 if not, 2 if the input is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from rich.console import Console

from whalepod.cluster.jobs.job_cluster import add_cluster_arguments, cluster_url, job_config, run_job

from .files import BatchOutput, read_requests
from .sending import SendingOptions, send_all


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m whalepod.cluster.jobs.batch", description=__doc__)
    parser.add_argument("--input", type=Path, required=True, help="JSONL of requests")
    parser.add_argument(
        "--output", type=Path, required=True, help="JSONL of answers; a job's directory goes with it: give a full path"
    )
    parser.add_argument("--url", help="a cluster that serves; default: one of its own, while the job runs")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time")
    parser.add_argument("--retry-max", type=int, default=8, help="further tries of a request that got no answer")
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    if arguments.concurrency < 1 or arguments.retry_max < 0:
        parser.error("--concurrency must be at least 1, --retry-max at least 0")
    console = Console(highlight=False, soft_wrap=True)

    async def work() -> int:
        requests = read_requests(arguments.input)
        output = BatchOutput.open(arguments.output)
        try:
            options = SendingOptions(
                concurrency=arguments.concurrency,
                retry_max=arguments.retry_max,
                api_key=os.environ.get("WHALEPOD_API_KEY"),
            )
            missing = any(request.custom_id not in output.done for request in requests)
            failed = sum(output.done.get(request.custom_id, 200) != 200 for request in requests)
            if missing:
                config = lambda: job_config(arguments.config, arguments.set, os.environ)  # noqa: E731
                async with cluster_url(arguments.url, config, say=console.print) as url:
                    counts = await send_all(requests, output, url=url, options=options, console=console)
                failed = counts.failed
            console.print(json.dumps({"requests": len(requests), "failed": failed, "output": str(arguments.output)}))
        finally:
            output.close()
        return 1 if failed else 0

    run_job(work, console)


if __name__ == "__main__":
    main()
