"""A server that sends anything, in any pieces, against both halves of the store's client: what Python alone makes of a
stream is what was meant, the C half makes the same of it, no wrong byte is ever taken, and nothing ends late.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of
from tests.native_build import ROOT, build_values
from whalepod.core.clock import SYSTEM_CLOCK, Clock, Deadline
from whalepod.core.ids import Incarnation
from whalepod.kvstore import pipeline
from whalepod.kvstore.faults import FaultReason, StoreFault
from whalepod.kvstore.native_library import NativeLibrary
from whalepod.kvstore.pipeline import Batch, Flight, read_values, write_values
from whalepod.kvstore.plain_block_headers import PlainBlockHeaders
from whalepod.kvstore.redis_transport import get_requests, set_commands
from whalepod.kvstore.resp import RespConnection
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.value_mac import ValueMac
from whalepod.kvstore.value_sinks import WantedBlocks
from whalepod.kvstore.value_writer import BlocksToWrite, BlockToPut, ValueWriter

KEYS = chain(7)
PAYLOADS = [payload_of(key) for key in KEYS]
MAC = ValueMac(b"m" * 32)
STALLS_S = (0.03, 0.5)
"""Deadline of a round whose server stops in the middle; and of another try, for a machine may be busy."""
PATIENCE_S = 20.0
"""Deadline of the others."""
LATE_S = 0.05
TICK_S = 0.0007
"""System calls are interrupted so often."""
INTEGERS = (b"-1", b"-0", b"-2", b"0", b"1", b"255", b"256", b"2147483648", b"4294967296", b"4503599627370496",
            b"9223372036854775807", b"9223372036854775808", b"-9223372036854775808", b"18446744073709551615",
            b"99999999999999999999", b"+5256", b"05256", b" 5256", b"5256 ", b"0x10", b"", b"1e3",
            b"\xd9\xa1")  # fmt: skip
LINES = (b"+OK", b"+", b"-", b"-ERR no", b"-OOM full", b"-MOVED 1 127.0.0.1:1", b"-ASK 1 :2", b"-WRONGTYPE it",
         b"-LOADING", b"-READONLY you", b"-NOAUTH", b"_", b"#t", b",1.5", b"%1", b"~2", b"*0", b"*-1", b"*2", b">0",
         b">1", b">2\r\n+a\r\n+b", b"*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n:1", b"!3\r\nabc", b"(1", b"=4\r\ntxt:", b"|1",
         b"HTTP/1.1 200 OK", b"\0", b"$", b"*", b":", b"?", b"$3\r\nabc", b"-" + b"x" * 3000)  # fmt: skip


@dataclass(frozen=True)
class Frozen:
    """Headers of both halves are made at the same time."""

    inner: Clock = SYSTEM_CLOCK

    def monotonic_s(self) -> float:
        return self.inner.monotonic_s()

    def unix_ms(self) -> int:
        return 1_700_000_000_000


WRITERS = {signed: ValueWriter(NAMESPACE, LAYOUT, Incarnation(1), StoreSettings(), Frozen(), mac)
           for signed, mac in ((False, None), (True, MAC))}  # fmt: skip
VALUES = {
    (index, signed): b"".join(
        bytes(piece) for piece in writer.block(key, (PAYLOADS[index],), exact=index % 2 == 0).pieces
    )
    for signed, writer in WRITERS.items()
    for index, key in enumerate(KEYS)
}


@dataclass(frozen=True)
class Server:
    """What one round's server sends, in which pieces, and what it does then."""

    pieces: Sequence[bytes]
    reads_first: int
    """Bytes of requests that it takes before it begins."""
    ends: str
    """`close`, `reset` or `stall`."""
    buffer_bytes: int
    """Of both ends, for what is sent: with few it goes in pieces. 0: as many as usual."""

    def serve(self, theirs: socket.socket, received: bytearray) -> None:
        with theirs, suppress(OSError):
            while len(received) < self.reads_first and (data := theirs.recv(self.reads_first - len(received))):
                received += data
            # It sends and takes at once, as a server whose client does the same must.
            sender = threading.Thread(target=self._send, args=(theirs,))
            sender.start()
            while data := theirs.recv(1 << 16):
                received += data
            sender.join()

    def _send(self, theirs: socket.socket) -> None:
        with suppress(OSError):
            for piece in self.pieces:
                theirs.sendall(piece)
            if self.ends != "stall":
                theirs.shutdown(socket.SHUT_WR if self.ends == "close" else socket.SHUT_RDWR)


def draw_server(draw: Random, replies: list[bytes], *, writing: bool) -> Server:
    stream = bytearray(b"".join(replies))
    for _ in range(draw.choice((0, 0, 0, 1, 1, 2, 5))):
        _damage(draw, stream)
    cuts = sorted(draw.randrange(len(stream) + 1) for _ in range(draw.choice((0, 0, 1, 3, 12, 40))))
    pieces = [bytes(stream[start:end]) for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
    if draw.random() < 0.1:  # byte by byte, around somewhere
        at = draw.randrange(len(stream) + 1)
        near = stream[at : at + 300]
        pieces = [bytes(stream[:at]), *(bytes([byte]) for byte in near), bytes(stream[at + 300 :])]
    ends = draw.choices(("close", "stall", "reset"), (6, 2, 1))[0]
    # No more than one request has: the client does not always send the next one before an answer.
    first = draw.choice((0, 0, 1, 50, 5000 if writing else 0))
    return Server([piece for piece in pieces if piece], first, ends, draw.choice((0, 0, 2048, 16384)))


def _damage(draw: Random, stream: bytearray) -> None:
    at, count = draw.randrange(len(stream) + 1), draw.choice((1, 1, 2, 7, 300, 6000))
    if draw.random() < 0.5:  # where a reply begins or ends, rather than inside a value
        at = draw.choice([at, *(place for place in range(len(stream)) if stream.startswith((b"\r\n", b"$"), place))])
    match draw.randrange(5):
        case 0:
            stream[at : at + 1] = bytes([draw.randrange(256)])
        case 1:
            del stream[at : at + count]
        case 2:
            stream[at:at] = draw.choice((draw.randbytes(count), b"\r\n", draw.choice(LINES) + b"\r\n"))
        case 3:
            stream[at:at] = stream[at : at + count]
        case _:
            del stream[at:]


def draw_read_replies(draw: Random, *, signed: bool) -> list[bytes]:
    replies: list[bytes] = []
    for index in range(len(KEYS)):
        value, kind = VALUES[index, signed], draw.random()
        if kind < 0.7:
            replies.append(b"$%d\r\n%b\r\n" % (len(value), value))
        elif kind < 0.76:
            other = VALUES[draw.randrange(len(KEYS)), draw.random() < 0.5]
            replies.append(b"$%d\r\n%b\r\n" % (len(other), other))
        elif kind < 0.8:
            cut = value[: draw.choice((0, 1, 255, 256, 257, 320, 321, len(value) - 1))]
            replies.append(b"$%d\r\n%b\r\n" % (len(cut), cut))
        elif kind < 0.88:
            replies.append(b"$%b\r\n%b\r\n" % (draw.choice(INTEGERS), value[: draw.choice((0, 1, len(value)))]))
        elif kind < 0.92:
            replies.append(draw.choice((b"$-1\r\n", b"_\r\n")))
        else:
            replies.append(draw.choice(LINES) + b"\r\n")
    return replies


def draw_write_replies(draw: Random) -> list[bytes]:
    usual = (b"+OK\r\n", b"+OK\r\n", b"$-1\r\n", b"_\r\n")
    return [draw.choice(usual) if draw.random() < 0.85 else draw.choice(LINES) + b"\r\n" for _ in KEYS]


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
    draw: Random, server: Server, stall_s: float, talk: Callable[[RespConnection, Deadline], object]
) -> tuple[Outcome, bytes]:
    """What came of `talk`, and what the server received."""
    received = bytearray()
    with ends_of(draw) as (ours, theirs, local):
        for end in (ours, theirs) if server.buffer_bytes else ():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, server.buffer_bytes)
        connection = RespConnection(ours, StoreAddress(path="/local") if local else None)
        thread = threading.Thread(target=server.serve, args=(theirs, received))
        thread.start()
        deadline = Deadline.after(stall_s if server.ends == "stall" else PATIENCE_S)
        fault, said = None, None
        try:
            said = talk(connection, deadline)
        except StoreFault as caught:
            fault = caught.reason
        late_s = -min(0.0, deadline.at_s - SYSTEM_CLOCK.monotonic_s())
        connection.close()
        thread.join()
    return Outcome(fault, said, late_s), bytes(received)


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

    def talk(connection: RespConnection, deadline: Deadline) -> object:
        batch = Batch(range(len(KEYS)))
        pipeline.IN_FLIGHT_BYTES = in_flight
        requests = get_requests(sinks.keys)
        flight = Flight(connection, requests, item_bytes=LAYOUT.payload_bytes, deadline=deadline, alone=alone)
        moved = read_values(connection, batch, sinks, answered, flight, deadline=deadline)
        return moved, sorted(batch.elsewhere), batch.strange

    outcome, _ = play(draw, server, stall_s, talk)
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

    def talk(connection: RespConnection, deadline: Deadline) -> object:
        pipeline.IN_FLIGHT_BYTES = in_flight
        for _, reply in write_values([connection], Batch(items), values, starts, ends, deadline=deadline):
            replies.append(reply)
        return len(replies)

    outcome, received = play(draw, server, stall_s, talk)
    meant = b"".join(
        piece
        for item, start, end in zip(items, starts, ends, strict=True)
        for piece in (start, *map(bytes, values[item].pieces), end)
    )
    right = meant.startswith(received)  # the last bytes are lost with a connection that is closed in doubt
    if outcome.fault is FaultReason.TIMEOUT:
        return replace(outcome, said=None), right
    return replace(outcome, said=(outcome.said, replies)), right


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
        for kind in (play_read, play_write):
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
