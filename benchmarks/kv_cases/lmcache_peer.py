"""LMCache's native RESP client, in a process of its own: told on standard input what to do, answers in seconds.

    python lmcache_peer.py LIBRARY_DIR HOST PORT WORKERS < {"keys": …, "bytes": …, "batch": …} then set | get | lost

It runs beside the environment that `make bench-peers` makes; nothing of it is imported by the project.
"""

from __future__ import annotations

import importlib
import json
import random
import select
import sys
import time
from collections.abc import Callable
from typing import Any

LOST_S = 3.0
"""How long a read of an evicted key may take before it counts as hanging."""


def main() -> None:
    library, host, port, workers = sys.argv[1:]
    importlib.import_module("torch")  # its libraries are what the client is linked against
    sys.path.insert(0, library)
    native = importlib.import_module("lmcache_redis")
    client = native.LMCacheRedisClient(host, int(port), int(workers), "", "")
    work = json.loads(sys.stdin.readline())
    keys, batch = work["keys"], work["batch"]
    draw = random.Random(1)
    payloads = [memoryview(bytearray(draw.randbytes(work["bytes"]))) for _ in keys]
    buffers = [memoryview(bytearray(work["bytes"])) for _ in keys]
    for line in sys.stdin:
        submit, views = {
            "set": (client.submit_batch_set, payloads),
            "get": (client.submit_batch_get, buffers),
            "lost": (client.submit_batch_get, buffers),
        }[line.strip()]
        seconds = _run(client, submit, keys, views, batch, patience_s=LOST_S if line.strip() == "lost" else 60.0)
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()


def _run(
    client: Any,  # noqa: ANN401  an untyped library
    submit: Callable[[list[str], list[memoryview]], int],
    keys: list[str],
    views: list[memoryview],
    batch: int,
    *,
    patience_s: float,
) -> float | str:
    """Seconds until every batch was answered, or why it was not."""
    start_s = time.perf_counter()
    waiting = {submit(keys[at : at + batch], views[at : at + batch]) for at in range(0, len(keys), batch)}
    while waiting:
        if not select.select([client.event_fd()], [], [], patience_s)[0]:
            return "hangs"
        for number, ok, error, _ in client.drain_completions():
            waiting.discard(number)
            if not ok:
                return f"fails: {error}"
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
