"""How fast blocks go to and from one Redis server: our client, redis-py with hiredis, LMCache's native client if
`make bench-peers` has fetched it, and raw sockets as the bound.

    python benchmarks/kv.py [--blocks N] [--payload-bytes N] [--rounds N] [--port N] [--link-mb N]

One run, one server, the same blocks; contenders take short turns, every other round in the opposite order. A speed is
the median of its rounds; a ratio is the median of the ratios of each round, between the better number of connections of
either. SET is measured twice: to a server that has given its memory back (`FLUSHALL`), so that it is short of memory at
each page, and, `reused`, to one that deletes before it stores, as a full store does. The bound is
the better of raw sockets with 16 and with 4 commands at once: on one machine less in flight is faster. It looks at
nothing and reads into one buffer; `raw + xxh3` hashes what it reads, as our client does, and `raw apart` leaves each
block in memory of its own, as every other contender does. CPU is that of the client's process. Then 64 imports at once
over a link of fixed speed. The last line is one JSON object: `set_gbs` and `get_gbs` of our client over TCP, and its
ratios to the others there; `…_over_raw_16` is against raw sockets in batches of 16 only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis
from kv_cases.contenders import Contender, LmCache, Ours, Raw, RedisPy, Work, redis_client
from kv_cases.imports import IMPORTS, measure_imports
from kv_cases.server import benchmark_server

from whalepod.core.block_keys import RUN_BLOCKS
from whalepod.kvstore import pipeline
from whalepod.kvstore.settings import StoreAddress

RELEASE_PAYLOAD_BYTES = 227_840
"""256 tokens of 890 bytes."""
PEERS = Path(__file__).parent.parent / ".bench-peers"
"""Made by `make bench-peers`."""
TURN_S = 0.05
"""A contender's turn lasts at least this long."""
TIMES_PYTHON_ALONE = 4
"""Turns of what takes a second."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Payload bytes a second, in GB/s, of each round."""

    set: list[float] = field(default_factory=list[float])
    set_reused: list[float] = field(default_factory=list[float])
    get: list[float] = field(default_factory=list[float])
    get_cpu_s_per_gb: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Best:
    """The better number of connections of one kind of contender, for each direction."""

    set: list[float]
    set_reused: list[float]
    get: list[float]

    @classmethod
    def of(cls, speeds: dict[str, Speeds], prefix: str) -> Best:
        chosen = [each for name, each in speeds.items() if name.startswith(prefix)]
        return cls(
            set=max((each.set for each in chosen), key=statistics.median),
            set_reused=max((each.set_reused for each in chosen), key=statistics.median),
            get=max((each.get for each in chosen), key=statistics.median),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4 * RUN_BLOCKS, help="moved at once, a multiple of 16")
    parser.add_argument("--payload-bytes", type=int, default=RELEASE_PAYLOAD_BYTES, help="of one block")
    parser.add_argument("--rounds", type=int, default=16, help="turns of each contender")
    parser.add_argument("--link-mb", type=float, default=500.0, help="MB/s of the link that imports share")
    parser.add_argument("--port", type=int, default=16390, help="for the server that is started here")
    options = parser.parse_args()
    if options.blocks < RUN_BLOCKS or options.blocks % RUN_BLOCKS:
        parser.error("--blocks must be a multiple of 16")
    library = PEERS / "lmcache" if (PEERS / "lmcache").is_dir() else None
    if library is None:
        print("no LMCache here: make bench-peers")
    draw = random.Random(1)
    work = Work.of(options.blocks, [draw.randbytes(options.payload_bytes) for _ in range(options.blocks)])
    with benchmark_server(options.port) as server:
        print(
            f"redis {server.version}, python {platform.python_version()}, {os.cpu_count()} cores, {platform.machine()}"
        )
        print(f"{options.blocks} blocks of {options.payload_bytes} bytes, batches of {RUN_BLOCKS}, copies at "
              f"{_copy_gbs(work):.1f} GB/s")  # fmt: skip
        print(f"{'':6}{'':34}{'SET GB/s':>10}{'reused':>10}{'GET GB/s':>10}{'GET CPU s/GB':>14}")
        figures: dict[str, float] = {}
        speeds = {
            where: _measured(address, work, rounds=options.rounds, where=where, library=library, figures=figures)
            for where, address in (("unix", server.unix), ("tcp", server.tcp))
        }
        imports = measure_imports(server, work, port=options.port + 1, megabytes_per_s=options.link_mb)
        print(
            f"{IMPORTS} imports at once, {imports.gigabytes:.2f} GB over a link of {options.link_mb:.0f} MB/s: exposed"
            f" p50 {imports.exposed_ms_p50:.0f} ms, last {imports.exposed_ms_max:.0f} ms,"
            f" {imports.share_of_link:.2f} of the link, {imports.cpu_s_per_gb:.2f} CPU s/GB"
        )
    figures |= {
        "import_exposed_ms": round(imports.exposed_ms_p50, 1),
        "import_share_of_link": round(imports.share_of_link, 3),
        "import_cpu_s_per_gb": round(imports.cpu_s_per_gb, 3),
    }
    print(json.dumps({**_summary(speeds["tcp"], speeds["unix"]), **figures}))


def _measured(
    address: StoreAddress,
    work: Work,
    *,
    rounds: int,
    where: str,
    library: Path | None,
    figures: dict[str, float],
) -> dict[str, Speeds]:
    ours = [Ours(address, work, connections=connections) for connections in (1, 2, 4)]
    contenders: list[Contender] = [
        *ours,
        RedisPy(address, work),
        *(LmCache(library, address, work, workers=workers) for workers in (2, 4) if library and address.host),
        *(Raw(address, work, connections=count, at_once=at_once) for at_once in (RUN_BLOCKS, 4) for count in (1, 2)),
        *(Raw(address, work, connections=count, at_once=4, hashed=True) for count in (1, 2)),
        *(Raw(address, work, connections=count, at_once=4, apart=True) for count in (1, 2)),
    ]
    admin = redis_client(address)
    speeds = {contender.name: Speeds() for contender in contenders}
    names = [*work.names, *(f"peer:{number}" for number in range(len(work.names)))]
    for number in range(rounds):
        for contender in reversed(contenders) if number % 2 else contenders:
            speed, empty = speeds[contender.name], partial(admin.flushall, asynchronous=False)
            speed.set.append(_gbs(contender.set, work, before=empty)[0])
            speed.set_reused.append(_gbs(contender.set, work, before=partial(admin.delete, *names))[0])
            gbs, cpu_s_per_gb = _gbs(contender.get, work)
            speed.get.append(gbs)
            speed.get_cpu_s_per_gb.append(cpu_s_per_gb)
    if where == "tcp":
        admin.flushall(asynchronous=False)
        ours[0].set()
        figures["p99_ms"] = _p99_ms(ours[1], ours[0])
        print(f"{'':6}one block at a time while others move all: p99 {figures['p99_ms']:.1f} ms")
        figures |= _beside_a_busy_thread(ours[0], work)
        _say_what_a_lost_key_does(admin, work, contenders)
    for contender in contenders:
        contender.close()
        speed = speeds[contender.name]
        columns = [statistics.median(each) for each in (speed.set, speed.set_reused, speed.get)]
        spent = "" if isinstance(contender, LmCache) else f"{statistics.median(speed.get_cpu_s_per_gb):14.3f}"
        print(f"{where:6}{contender.name:34}" + "".join(f"{gbs:10.2f}" for gbs in columns) + spent)
    admin.close()
    return speeds


def _p99_ms(busy: Ours, asking: Ours) -> float:
    """Of single-block reads by one client while another reads everything again and again."""
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            busy.get()

    thread = threading.Thread(target=load)
    thread.start()
    seconds = sorted(asking.get_one(number % 16) for number in range(500))
    stop.set()
    thread.join()
    return round(1000 * seconds[int(0.99 * len(seconds))], 2)


def _beside_a_busy_thread(ours: Ours, work: Work) -> dict[str, float]:
    """Reads while another thread of the process computes in Python, as an engine does: with the native half and
    without."""
    stop = threading.Event()

    def compute() -> None:
        value = 0
        while not stop.is_set():
            value = (31 * value + 7) % 1_000_003

    native, speeds = pipeline.NATIVE, dict[bool, list[float]]({True: [], False: []})
    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(TIMES_PYTHON_ALONE):
            for is_native in speeds:
                pipeline.NATIVE = native if is_native else None
                speeds[is_native].append(_gbs(ours.get, work)[0])
    finally:
        pipeline.NATIVE = native
        stop.set()
        thread.join()
    with_it, without = (statistics.median(speeds[is_native]) for is_native in (True, False))
    print(f"{'':6}beside a thread that computes: {with_it:.2f} GB/s, without the native half {without:.2f}")
    return {"get_busy_gbs": round(with_it, 3), "get_busy_over_python": round(with_it / without, 3)}


def _say_what_a_lost_key_does(admin: redis.Redis, work: Work, contenders: Sequence[Contender]) -> None:
    """One of 16 keys is evicted between probe and read."""
    for contender in contenders:
        if isinstance(contender, Ours | RedisPy | LmCache):
            admin.flushall(asynchronous=False)
            contender.set()
            admin.delete(work.names[5], "peer:5")
            print(f"{'':6}{contender.name}, an evicted key: {contender.lost()}")


def _gbs(move: Callable[[], object], work: Work, *, before: Callable[[], object] | None = None) -> tuple[float, float]:
    """Speed of moving all the work again and again for a round, and this process's CPU seconds a GB; `before` each time
    is not counted."""
    spent_s = cpu_s = 0.0
    moved = 0
    owner = getattr(move, "__self__", None)
    while spent_s < TURN_S:
        if before is not None:
            before()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        move()
        seconds = time.perf_counter() - start_s
        cpu_s += time.process_time() - start_cpu_s
        spent_s += owner.seconds if isinstance(owner, LmCache) else seconds  # a peer's own clock: no pipe in it
        moved += len(work.payloads) * work.payload_bytes
    return moved / spent_s / 1e9, cpu_s / moved * 1e9


def _copy_gbs(work: Work) -> float:
    into = bytearray(work.payload_bytes)

    def copy() -> None:
        for payload in work.payloads:
            into[:] = payload

    return _gbs(copy, work)[0]


def _summary(tcp: dict[str, Speeds], unix: dict[str, Speeds]) -> dict[str, float]:
    ours, ours_unix = Best.of(tcp, "whalepod"), Best.of(unix, "whalepod")
    figures = {
        "set_gbs": statistics.median(ours.set),
        "set_reused_gbs": statistics.median(ours.set_reused),
        "get_gbs": statistics.median(ours.get),
        "unix_set_gbs": statistics.median(ours_unix.set),
        "unix_get_gbs": statistics.median(ours_unix.get),
    }
    others = {"raw": "raw,", "raw_hashed": "raw + xxh3", "raw_apart": "raw apart", "raw_16": "raw, 16"}
    for name, prefix in {**others, "lmcache": "LMCache", "redis_py": "redis-py"}.items():
        if any(each.startswith(prefix) for each in tcp):
            figures |= {f"{way}_over_{name}": ratio for way, ratio in _ratios(ours, Best.of(tcp, prefix)).items()}
        if any(each.startswith(prefix) for each in unix):
            ratios = _ratios(ours_unix, Best.of(unix, prefix))
            figures |= {f"unix_{way}_over_{name}": ratio for way, ratio in ratios.items()}
    return {name: round(value, 3) for name, value in figures.items()}


def _ratios(ours: Best, theirs: Best) -> dict[str, float]:
    """Medians of those of each round."""
    pairs = {
        "set": (ours.set, theirs.set),
        "set_reused": (ours.set_reused, theirs.set_reused),
        "get": (ours.get, theirs.get),
    }
    return {
        way: statistics.median(mine / other for mine, other in zip(*pair, strict=True)) for way, pair in pairs.items()
    }


if __name__ == "__main__":
    main()
