"""How fast blocks go to and from one Redis server: our client, redis-py with hiredis, and raw sockets as the bound.

    python benchmarks/kv.py [--blocks N] [--payload-bytes N] [--rounds N] [--port N]

One run, one server, the same blocks; contenders take turns, and each figure is the median of its rounds. The last line
is one JSON object: `set_gbs` and `get_gbs` of our client over TCP, and its ratios to the others there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_cases.contenders import Contender, Ours, Raw, RedisPy, Work, redis_client
from kv_cases.server import benchmark_server

from whalepod.core.block_keys import RUN_BLOCKS
from whalepod.kvstore.settings import StoreAddress

RELEASE_PAYLOAD_BYTES = 227_840
"""256 tokens of 890 bytes."""
ROUND_S = 0.3
"""A contender's turn lasts at least this long."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Payload bytes a second, in GB/s."""

    set_gbs: float
    get_gbs: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4 * RUN_BLOCKS, help="moved at once, a multiple of 16")
    parser.add_argument("--payload-bytes", type=int, default=RELEASE_PAYLOAD_BYTES, help="of one block")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--port", type=int, default=16390, help="for the server that is started here")
    options = parser.parse_args()
    if options.blocks < RUN_BLOCKS or options.blocks % RUN_BLOCKS:
        parser.error("--blocks must be a multiple of 16")
    draw = random.Random(1)
    work = Work.of(options.blocks, [draw.randbytes(options.payload_bytes) for _ in range(options.blocks)])
    with benchmark_server(options.port) as server:
        print(
            f"redis {server.version}, python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}"
        )
        print(f"{options.blocks} blocks of {options.payload_bytes} bytes, batches of {RUN_BLOCKS}, copies at "
              f"{_copy_gbs(work):.1f} GB/s")  # fmt: skip
        print(f"{'':6}{'':30}{'SET GB/s':>10}{'GET GB/s':>10}")
        speeds = {
            where: _measured(address, work, rounds=options.rounds, where=where)
            for where, address in (("unix", server.unix), ("tcp", server.tcp))
        }
    print(json.dumps(_summary(speeds["tcp"], speeds["unix"])))


def _measured(address: StoreAddress, work: Work, *, rounds: int, where: str) -> dict[str, Speed]:
    contenders: list[Contender] = [
        Ours(address, work, connections=1),
        Ours(address, work, connections=2),
        RedisPy(address, work),
        Raw(address, work, connections=1),
        Raw(address, work, connections=2),
    ]
    admin = redis_client(address)
    sets: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    gets: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            sets[contender.name].append(_gbs(contender.set, work, before=lambda: admin.flushall(asynchronous=False)))
            gets[contender.name].append(_gbs(contender.get, work))
    speeds: dict[str, Speed] = {}
    for contender in contenders:
        contender.close()
        speed = Speed(statistics.median(sets[contender.name]), statistics.median(gets[contender.name]))
        speeds[contender.name] = speed
        print(f"{where:6}{contender.name:30}{speed.set_gbs:10.2f}{speed.get_gbs:10.2f}")
    admin.close()
    return speeds


def _gbs(move: Callable[[], object], work: Work, *, before: Callable[[], object] | None = None) -> float:
    """Speed of moving all the work again and again for a round; `before` each time is not counted."""
    spent_s = 0.0
    moved = 0
    while spent_s < ROUND_S:
        if before is not None:
            before()
        start_s = time.perf_counter()
        move()
        spent_s += time.perf_counter() - start_s
        moved += len(work.payloads) * work.payload_bytes
    return moved / spent_s / 1e9


def _copy_gbs(work: Work) -> float:
    into = bytearray(work.payload_bytes)

    def copy() -> None:
        for payload in work.payloads:
            into[:] = payload

    return _gbs(copy, work)


def _summary(tcp: dict[str, Speed], unix: dict[str, Speed]) -> dict[str, float]:
    ours, raw, peer = (_best(tcp, name) for name in ("whalepod", "raw", "redis-py"))
    ours_unix, raw_unix = _best(unix, "whalepod"), _best(unix, "raw")
    figures = {
        "set_gbs": ours.set_gbs,
        "get_gbs": ours.get_gbs,
        "set_over_raw": ours.set_gbs / raw.set_gbs,
        "get_over_raw": ours.get_gbs / raw.get_gbs,
        "set_over_redis_py": ours.set_gbs / peer.set_gbs,
        "get_over_redis_py": ours.get_gbs / peer.get_gbs,
        "unix_set_gbs": ours_unix.set_gbs,
        "unix_get_gbs": ours_unix.get_gbs,
        "unix_set_over_raw": ours_unix.set_gbs / raw_unix.set_gbs,
        "unix_get_over_raw": ours_unix.get_gbs / raw_unix.get_gbs,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def _best(speeds: dict[str, Speed], prefix: str) -> Speed:
    """The better number of connections, for each direction."""
    chosen: Sequence[Speed] = [speed for name, speed in speeds.items() if name.startswith(prefix)]
    return Speed(max(speed.set_gbs for speed in chosen), max(speed.get_gbs for speed in chosen))


if __name__ == "__main__":
    main()
