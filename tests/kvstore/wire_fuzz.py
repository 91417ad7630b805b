"""A server that sends anything, in any pieces, against both halves of the store's client: what Python alone makes of a
stream is what was meant, the C half makes the same of it, no wrong byte is ever taken, and nothing ends late.

Values are read and written over one connection, and written over a few at once.

    python -m tests.kvstore.wire_fuzz [--rounds N] [--seed N] [--sanitize]

`--sanitize` runs it with a C half that gcc has built with its address and undefined-behaviour sanitizers, and Python's
memory from malloc, so that a byte read or written outside is an error. A timer interrupts system calls all the while.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tests.kvstore.values import LAYOUT, NAMESPACE, buffers
from tests.kvstore.wire_streams import (
    KEYS,
    MAC,
    PAYLOADS,
    WRITERS,
    Server,
    draw_read_replies,
    draw_server,
    draw_write_replies,
)
from tests.native_build import ROOT, build_values
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.kvstore import pipeline
from whalepod.kvstore.faults import FaultReason, StoreFault
from whalepod.kvstore.native_library import NativeLibrary
from whalepod.kvstore.pipeline import Batch, Flight, read_values, write_values
from whalepod.kvstore.plain_block_headers import PlainBlockHeaders
from whalepod.kvstore.redis_transport import get_requests, set_commands
from whalepod.kvstore.resp import RespConnection
from whalepod.kvstore.settings import StoreAddress
from whalepod.kvstore.value_sinks import WantedBlocks
from whalepod.kvstore.value_writer import BlocksToWrite, BlockToPut

STALLS_S = (0.03, 0.5)
"""Deadline of a round whose server stops in the middle; and of another try, for a machine may be busy."""
PATIENCE_S = 20.0
"""Deadline of the others."""
LATE_S = 0.05
TICK_S = 0.0007
"""System calls are interrupted so often."""


@dataclass(frozen=True)
class Outcome:
    """What one half made of a stream; two of them are compared."""

    fault: FaultReason | None
    said: object
    late_s: float


Kind = Callable[[int, float], tuple[Outcome, bool]]
"""From a seed and the deadline of a server that stops: what came of it, and whether no byte was wrong."""


@contextmanager
def ends_of(draw: Random) -> Generator[tuple[socket.socket, socket.socket, bool]]:
    """Ours, theirs, and whether a server there counts as one of this machine."""
    if draw.random() < 0.5:
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs, draw.random() < 0.5


def play(
    draw: Random,
    servers: Sequence[Server],
    patience_s: float,
    talk: Callable[[Sequence[RespConnection], Deadline], object],
) -> tuple[Outcome, list[bytes]]:
    """What came of `talk` with a connection to each server, and what the servers received."""
    received = [bytearray() for _ in servers]
    with ExitStack() as opened:
        connections, threads = list[RespConnection](), list[threading.Thread]()
        for server, got in zip(servers, received, strict=True):
            ours, theirs, local = opened.enter_context(ends_of(draw))
            for end in (ours, theirs) if server.buffer_bytes else ():
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, server.buffer_bytes)
            connections.append(RespConnection(ours, StoreAddress(path="/local") if local else None))
            threads.append(threading.Thread(target=server.serve, args=(theirs, got)))
            threads[-1].start()
        deadline = Deadline.after(patience_s)
        fault, said = None, None
        try:
            said = talk(connections, deadline)
        except StoreFault as caught:
            fault = caught.reason
        late_s = -min(0.0, deadline.at_s - SYSTEM_CLOCK.monotonic_s())
        for connection, thread in zip(connections, threads, strict=True):
            connection.close()
            thread.join()
    return Outcome(fault, said, late_s), [bytes(got) for got in received]


def _patience_s(server: Server, stall_s: float) -> float:
    return stall_s if server.ends == "stall" else PATIENCE_S


def play_read(seed: int, stall_s: float) -> tuple[Outcome, bool]:
    """Of one stream of values; and whether every value that was taken is the right one."""
    draw = Random(seed)
    signed = draw.random() < 0.3
    server = draw_server(draw, draw_read_replies(draw, signed=signed), writing=False)
    headers = PlainBlockHeaders(NAMESPACE, LAYOUT, signed=signed)
    blocks = WantedBlocks(
        KEYS, buffers(len(KEYS)), headers, exact_only=draw.random() < 0.2, mac=MAC if signed else None
    )
    in_flight, alone = draw.choice((1, 3, 5, 100)) * LAYOUT.payload_bytes, draw.random() < 0.5
    order = draw.sample(range(len(KEYS)), len(KEYS)) if draw.random() < 0.1 else range(len(KEYS))
    sinks, answered = blocks.batch(order), bytearray(len(KEYS))

    def talk(connections: Sequence[RespConnection], deadline: Deadline) -> object:
        (connection,), batch = connections, Batch(range(len(KEYS)))
        pipeline.IN_FLIGHT_BYTES = in_flight
        requests = get_requests(sinks.keys)
        flight = Flight(connection, requests, item_bytes=LAYOUT.payload_bytes, deadline=deadline, alone=alone)
        moved = read_values(connection, batch, sinks, answered, flight, deadline=deadline)
        return moved, sorted(batch.elsewhere), batch.strange

    outcome, _ = play(draw, [server], _patience_s(server, stall_s), talk)
    taken = [
        (blocks.verdicts[number], blocks.rejected.get(number))
        for number, whole in zip(order, answered, strict=True)
        if whole
    ]
    arrived = [blocks.arrived(number) for number in range(len(KEYS))]
    right = all(there is None or bytes(there[0]) == payload for there, payload in zip(arrived, PAYLOADS, strict=True))
    if server.ends == "stall" and outcome.fault is FaultReason.TIMEOUT:
        return replace(outcome, said=None), right  # how far it came until then is no matter of meaning
    return replace(outcome, said=(outcome.said, taken, list(answered))), right


def play_write(seed: int, stall_s: float) -> tuple[Outcome, bool]:
    """Of one stream of answers; and whether the server got what it should, up to where it ended."""
    draw = Random(seed)
    server = draw_server(draw, draw_write_replies(draw), writing=True)
    values = BlocksToWrite(WRITERS[False], [BlockToPut(key, memoryview(payload), exact=True)
                                            for key, payload in zip(KEYS, PAYLOADS, strict=True)])  # fmt: skip
    if draw.random() < 0.1:
        assert values[draw.randrange(len(KEYS))].pieces  # made before
    items = range(len(KEYS))
    starts, ends = set_commands(values, items, only_if_absent=draw.random() < 0.5)
    in_flight = draw.choice((1, 3, 5, 100)) * LAYOUT.payload_bytes
    replies: list[object] = []

    def talk(connections: Sequence[RespConnection], deadline: Deadline) -> object:
        pipeline.IN_FLIGHT_BYTES = in_flight
        for _, reply in write_values(connections, Batch(items), values, starts, ends, deadline=deadline):
            replies.append(reply)
        return len(replies)

    outcome, (received,) = play(draw, [server], _patience_s(server, stall_s), talk)
    meant = _sent(values, items, starts, ends)
    right = _got_its_own(server, outcome.fault, received, meant)
    if outcome.fault is FaultReason.TIMEOUT:
        return replace(outcome, said=None), right
    return replace(outcome, said=(outcome.said, replies)), right


def _sent(values: BlocksToWrite, items: Sequence[int], starts: Sequence[bytes], ends: Sequence[bytes]) -> bytes:
    return b"".join(
        piece
        for item, start, end in zip(items, starts, ends, strict=True)
        for piece in (start, *map(bytes, values[item].pieces), end)
    )


def _got_its_own(server: Server, fault: FaultReason | None, received: bytes, meant: bytes) -> bool:
    """All of it, unless one of both ended: then the last bytes may be lost."""
    return meant.startswith(received) and (received == meant or fault is not None or server.ends == "reset")


def play_lanes(seed: int, stall_s: float) -> tuple[Outcome, bool]:
    """Of a stream of answers for each of a few connections, which Python alone takes one after the other; and whether
    each server got what it should. `said`: by connection, what put it in doubt, if that is known, and the replies."""
    draw = Random(seed)
    servers = lane_servers(draw)
    values = BlocksToWrite(WRITERS[False], [BlockToPut(key, memoryview(payload), exact=True)
                                            for key, payload in zip(KEYS, PAYLOADS, strict=True)])  # fmt: skip
    if draw.random() < 0.1:
        assert values[draw.randrange(len(KEYS))].pieces  # made before
    items, step = range(len(KEYS)), len(servers)
    starts, ends = set_commands(values, items, only_if_absent=draw.random() < 0.5)
    pipeline.IN_FLIGHT_BYTES = draw.choice((1, 3, 100)) * LAYOUT.payload_bytes
    replies: list[list[object]] = [[] for _ in servers]

    def over(connections: Sequence[RespConnection], lane: int | None, deadline: Deadline) -> None:
        own = slice(lane, None, step if lane is not None else 1)
        for number, reply in write_values(
            connections, Batch(items[own]), values, starts[own], ends[own], deadline=deadline
        ):
            replies[number % step if lane is None else lane].append(reply)

    patience_s = stall_s if any(server.ends == "stall" for server in servers) else PATIENCE_S
    if pipeline.NATIVE is None:
        played = [
            play(draw, [server], patience_s, lambda ends, deadline, lane=lane: over(ends, lane, deadline))
            for lane, server in enumerate(servers)
        ]
        outcomes, received = [outcome for outcome, _ in played], [got for _, (got,) in played]
    else:
        outcome, received = play(draw, servers, patience_s, lambda ends, deadline: over(ends, None, deadline))
        outcomes = [outcome] * step
    right = all(
        _got_its_own(
            server, outcomes[lane].fault, got, _sent(values, items[lane::step], starts[lane::step], ends[lane::step])
        )
        for lane, (server, got) in enumerate(zip(servers, received, strict=True))
    )
    faults = [outcome.fault for outcome in outcomes]
    fault = next(filter(None, faults), None)
    return Outcome(fault, list(zip(faults, replies, strict=True)), max(each.late_s for each in outcomes)), right


def lane_servers(draw: Random) -> list[Server]:
    lanes = draw.choice((2, 2, 3, 4))
    replies = draw_write_replies(draw)
    return [draw_server(draw, replies[lane::lanes], writing=True) for lane in range(lanes)]


def _lanes_alike(seed: int, python: Outcome, c: Outcome) -> bool:
    """A connection in doubt ends all: of the others some answers may not have been taken. Without one all were."""
    assert isinstance(python.said, list)
    assert isinstance(c.said, list)
    may_differ = [server.ends == "reset" for server in lane_servers(Random(seed))]
    faults = {fault for fault, _ in python.said}
    for (fault, meant), (_, took), unsure in zip(python.said, c.said, may_differ, strict=True):
        unsure = unsure or fault is FaultReason.TIMEOUT  # how far it came is no matter of meaning
        if took[: len(meant)] != meant[: len(took)] or (len(took) > len(meant) and not unsure):
            return False
        if c.fault is None and (fault is not None or took != meant) and not unsure:
            return False
    return c.fault in faults or any(may_differ)


@contextmanager
def half(native: NativeLibrary | None) -> Generator[None]:
    kept = pipeline.NATIVE, pipeline.IN_FLIGHT_BYTES
    pipeline.NATIVE = native
    try:
        yield
    finally:
        pipeline.NATIVE, pipeline.IN_FLIGHT_BYTES = kept


def fuzz(rounds: int, *, seed: int, tell: Callable[[str], object] = print) -> Counter[str]:
    """Figures of so many streams of each kind: `rounds`, `wrong`, `unlike`, `late`."""
    native, figures = pipeline.NATIVE, Counter[str](wrong=0, unlike=0, late=0)
    for number in range(seed, seed + rounds):
        for kind in (play_read, play_write, play_lanes):
            python, c = _played(number, kind, native, stall_s=STALLS_S[0])
            if not _alike(number, kind, python, c):
                python, c = _played(number, kind, native, stall_s=STALLS_S[1])
            wrong, unlike = not (python[1] and c[1]), not _alike(number, kind, python, c)
            late = max(python[0].late_s, c[0].late_s) > LATE_S
            figures.update(rounds=1, wrong=int(wrong), unlike=int(unlike), late=int(late))
            figures[f"fault: {c[0].fault.value if c[0].fault else 'none'}"] += 1
            if wrong or unlike:
                tell(f"seed {number} {kind.__name__}:\n  {python}\n  {c}")
    return figures


def _played(
    seed: int, kind: Kind, native: NativeLibrary | None, *, stall_s: float
) -> tuple[tuple[Outcome, bool], tuple[Outcome, bool]]:
    """By Python alone, and with the C half."""
    with half(None):
        python = kind(seed, stall_s)
    with half(native):
        return python, kind(seed, stall_s)


def _alike(seed: int, kind: Kind, python: tuple[Outcome, bool], c: tuple[Outcome, bool]) -> bool:
    if kind is play_lanes:
        return _lanes_alike(seed, python[0], c[0])
    faults = (python[0].fault, c[0].fault)
    if FaultReason.RESET in faults and _resets(seed, kind):
        return True  # how far it came depends on the moment
    return (faults[0], python[0].said) == (faults[1], c[0].said)


def _resets(seed: int, kind: Kind) -> bool:
    draw = Random(seed)
    if kind is play_read:
        signed = draw.random() < 0.3
        return draw_server(draw, draw_read_replies(draw, signed=signed), writing=False).ends == "reset"
    return draw_server(draw, draw_write_replies(draw), writing=True).ends == "reset"


def sanitized(arguments: Sequence[str]) -> int:
    """Run this again with a library that watches every byte."""
    with tempfile.TemporaryDirectory() as folder:
        library = build_values(
            "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", output=Path(folder) / "values.so"
        )
        runtimes = [subprocess.run(["cc", f"-print-file-name={name}.so"], check=True, capture_output=True, text=True)
                    for name in ("libasan", "libubsan")]  # fmt: skip
        environment = {
            **os.environ,
            "LD_PRELOAD": ":".join(found.stdout.strip() for found in runtimes),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
        }
        command_line = [sys.executable, "-m", "tests.kvstore.wire_fuzz", "--library", str(library), *arguments]
        return subprocess.run(command_line, check=False, env=environment, cwd=ROOT).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--library", type=Path, help="of the C half; else the one that is installed")
    options = parser.parse_args()
    if options.sanitize:
        sys.exit(sanitized(["--rounds", str(options.rounds), "--seed", str(options.seed)]))
    if options.library:
        pipeline.NATIVE = NativeLibrary(options.library)
    assert pipeline.NATIVE is not None, "the C half was not built: python -m tests.native_build"
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
    figures = fuzz(options.rounds, seed=options.seed)
    signal.setitimer(signal.ITIMER_REAL, 0)  # at its end Python takes the handler away, and one more would kill it
    sys.stdout.write(json.dumps(dict(figures)) + "\n")
    sys.exit(figures["wrong"] + figures["unlike"] > 0)


if __name__ == "__main__":
    main()
