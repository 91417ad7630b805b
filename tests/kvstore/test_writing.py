"""Batches of values stored over one connection, by the native half and by Python alone."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from random import Random

import pytest
import xxhash

from tests.kvstore.scripted_server import read_command
from tests.kvstore.test_store_faults import LATE_S
from tests.kvstore.values import LAYOUT, NAMESPACE, chain, payload_of, soon
from tests.native_build import compiler
from whalepod.core.block_keys import BlockKey
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import Incarnation
from whalepod.kvstore import native_writes, pipeline
from whalepod.kvstore.faults import ErrorReply, FaultReason, StoreFault
from whalepod.kvstore.native_library import NATIVE
from whalepod.kvstore.native_writes import Drafts, Writing
from whalepod.kvstore.pipeline import Batch, write_values
from whalepod.kvstore.redis_transport import set_commands
from whalepod.kvstore.resp import Reply, RespConnection
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import block_store_key
from whalepod.kvstore.transport import ValuesToWrite
from whalepod.kvstore.value_format import Header, parse_header
from whalepod.kvstore.value_mac import ValueMac
from whalepod.kvstore.value_writer import BlocksToWrite, BlockToPut, ValueWriter

KEYS = chain(6)
STORED: dict[bytes, Reply] = {
    b"+OK\r\n": b"OK",
    b"$-1\r\n": None,
    b"_\r\n": None,
    b"-OOM full\r\n": ErrorReply("OOM", "full"),
    b">1\r\n+m\r\n+OK\r\n": b"OK",
    b"$2\r\nOK\r\n": b"OK",
    b":1\r\n": 1,
}
"""Answers, and what they mean."""


@pytest.fixture(params=["native", "python"], autouse=True)
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(pipeline, "NATIVE", None)
    elif NATIVE is None:
        pytest.skip("the native half was not built here")
    return request.param


def test_the_native_halves_are_there_where_a_compiler_is() -> None:
    assert NATIVE is not None or compiler() is None, (
        "they were not built: `make venv` or `python -m tests.native_build`"
    )


@dataclass
class Wrote:
    """What came of storing `KEYS`."""

    replies: list[Reply] = field(default_factory=list[Reply])
    fault: StoreFault | None = None
    late_s: float = 0.0


def values_of(keys: Sequence[BlockKey], *, mac: ValueMac | None = None, pieces: int = 1) -> BlocksToWrite:
    writer = ValueWriter(NAMESPACE, LAYOUT, Incarnation(1), StoreSettings(), SYSTEM_CLOCK, mac)
    cut, blocks = LAYOUT.payload_bytes // pieces, list[BlockToPut]()
    for key in keys:
        payload = payload_of(key)
        parts = [payload[at * cut : (at + 1) * cut if at < pieces - 1 else None] for at in range(pieces)]
        blocks.append(BlockToPut(key, parts if pieces > 1 else payload, exact=True, owner=7))
    return BlocksToWrite(writer, blocks)


def write(
    serve: Callable[[socket.socket], None],
    values: ValuesToWrite | None = None,
    *,
    deadline: Deadline | None = None,
) -> Wrote:
    """Store `values` with a server that does as `serve` does."""
    ours, theirs = socket.socketpair()
    deadline, wrote = deadline or soon(), Wrote()
    values = values or values_of(KEYS)
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    try:
        batch = Batch(range(len(values.keys)))
        commands = set_commands(values, batch.items, only_if_absent=True)
        for number, reply in write_values([RespConnection(ours)], batch, values, *commands, deadline=deadline):
            assert number == len(wrote.replies)
            wrote.replies.append(reply)
    except StoreFault as fault:
        wrote.fault = fault
    wrote.late_s = -deadline.remaining_s() if deadline.expired else 0.0
    ours.close()
    thread.join()
    theirs.close()
    return wrote


def answers(replies: Sequence[bytes], commands: list[list[bytes]]) -> Callable[[socket.socket], None]:
    """A server that notes commands and gives these replies, each in its own time."""

    def serve(theirs: socket.socket) -> None:
        with theirs.makefile("rb") as stream:
            for reply in replies:
                commands.append(read_command(stream))
                theirs.sendall(reply)

    return serve


def verified(value: bytes, key: BlockKey) -> bool:
    header = parse_header(value[:256])
    assert isinstance(header, Header)
    refusal = header.block_refusal(key, namespace=NAMESPACE, layout=LAYOUT, value_bytes=len(value))
    return (refusal, header.payload_refusal([value[header.header_bytes - 64 * bool(header.flags & 16) :]])) == (
        None,
        None,
    )


@pytest.mark.parametrize("variant", ["plain", "signed", "in pieces", "made before", "made before, one"])
def test_values_arrive_whole_and_as_their_headers_say(variant: str) -> None:
    mac = ValueMac(b"m" * 32) if variant == "signed" else None
    values = values_of(KEYS, mac=mac, pieces=3 if variant == "in pieces" else 1)
    if variant.startswith("made before"):
        made = range(6) if variant == "made before" else [2]
        assert all(values[item].pieces for item in made)
    commands: list[list[bytes]] = []
    assert write(answers([b"+OK\r\n"] * 6, commands), values).replies == [b"OK"] * 6
    for item, (key, words) in enumerate(zip(KEYS, commands, strict=True)):
        life_ms = StoreSettings().block_life_ms(key.depth)
        assert [words[0], words[1], *words[3:]] == [b"SET", block_store_key(key), b"NX", b"PX", b"%d" % life_ms]
        assert (values[item].key, values[item].life_ms) == (words[1], life_ms)
        assert verified(words[2], key)
        assert words[2].endswith(payload_of(key))


def test_any_mixture_of_answers_in_any_pieces_is_understood_alike_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(11)
    for _ in range(30):
        monkeypatch.setattr(pipeline, "IN_FLIGHT_BYTES", draw.choice((1, 2, 3, 100)) * LAYOUT.payload_bytes)
        given = [draw.choice(list(STORED)) for _ in KEYS]
        commands: list[list[bytes]] = []
        wrote = write(answers(given, commands))
        assert (wrote.replies, wrote.fault) == ([STORED[answer] for answer in given], None)
        assert all(verified(words[2], key) for words, key in zip(commands, KEYS, strict=True))


def test_answers_that_come_at_once_or_byte_by_byte_are_understood() -> None:
    stream = b"+OK\r\n$-1\r\n-OOM full\r\n_\r\n+OK\r\n$-1\r\n"

    def drip(theirs: socket.socket) -> None:
        with theirs.makefile("rb") as commands:
            for _ in KEYS:
                read_command(commands)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for at in range(len(stream)):
            theirs.sendall(stream[at : at + 1])

    assert write(drip).replies == [b"OK", None, ErrorReply("OOM", "full"), None, b"OK", None]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"+OK\r\n", FaultReason.RESET),
        (b"+OK\r\n+O", FaultReason.RESET),
        (b"+OK\r\n?\r\n", FaultReason.PROTOCOL),
        (b"+OK\r\n$-2x\r\n", FaultReason.PROTOCOL),
        (b"+OK\r\n$99999999999999999\r\n", FaultReason.PROTOCOL),
        (b"+OK\r\n" + b"*1\r\n" * 9, FaultReason.PROTOCOL),
    ],
)
def test_what_was_answered_before_a_broken_stream_counts(stream: bytes, reason: FaultReason) -> None:
    def serve(theirs: socket.socket) -> None:
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)
        while theirs.recv(1 << 16):
            pass

    wrote = write(serve)
    assert wrote.fault is not None
    assert (wrote.replies, wrote.fault.reason) == ([b"OK"], reason)


def test_a_server_that_goes_away_in_the_middle_of_a_value_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(theirs: socket.socket) -> None:
        theirs.recv(3000)
        theirs.close()

    monkeypatch.setattr(pipeline, "IN_FLIGHT_BYTES", 100 << 20)
    wrote = write(serve, values_of(KEYS * 20))
    assert wrote.fault is not None
    assert (wrote.replies, wrote.fault.reason) == ([], FaultReason.RESET)


@pytest.mark.parametrize("reads", ["nothing", "slowly", "all"])
def test_a_server_that_stops_ends_it_at_the_deadline(reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes nothing, or a little now and then, or everything and answers nothing."""
    monkeypatch.setattr(pipeline, "IN_FLIGHT_BYTES", 100 << 20)
    done = threading.Event()

    def serve(theirs: socket.socket) -> None:
        while not done.wait(0 if reads == "all" else 0.02):
            if reads != "nothing" and not theirs.recv(1000):
                return

    values = values_of(KEYS * 20)
    late_s: list[float] = []
    # What is late by its making is so every time, what a busy machine holds up is not.
    while len(late_s) < 3 and (not late_s or late_s[-1] >= LATE_S):
        deadline = Deadline.after(0.2)
        ender = threading.Timer(0.5, done.set)
        ender.start()
        wrote = write(serve, values, deadline=deadline)
        ender.cancel()
        ender.join()
        assert wrote.fault is not None
        assert (wrote.replies, wrote.fault.reason) == ([], FaultReason.TIMEOUT)
        late_s.append(wrote.late_s)
        done.clear()
    assert late_s[-1] < LATE_S, late_s


LENGTHS = [*range(0, 300, 7), 240, 241, *range(960, 1153, 16), 1023, 1025, 2047, 2048, 2049, 99_999]


@pytest.mark.parametrize("half", ["native"], indirect=True)
def test_the_hash_that_is_stamped_is_xxh3_of_any_length() -> None:
    assert NATIVE is not None
    draw = Random(3)
    for length in LENGTHS:
        payloads = [draw.randbytes(length) for _ in range(2)]
        ours, theirs = socket.socketpair()
        received: list[bytes] = []

        def serve(theirs: socket.socket = theirs, length: int = length, received: list[bytes] = received) -> None:
            with theirs.makefile("rb") as stream:
                for _ in range(2):
                    received.append(stream.read(256 + length))
                    theirs.sendall(b"+OK\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        drafts = Drafts(bytes(512), payloads, length, stamp=True)
        with closing(Writing(NATIVE, drafts, [b""] * 2, [b""] * 2, lanes=1, ahead=2)) as writing:
            (advance,) = writing.proceed([RespConnection(ours).lend()], timeout_s=5)
        thread.join()
        ours.close()
        theirs.close()
        assert advance == (range(2), bytes([native_writes.STORED] * 2), None)
        assert [value[256:] for value in received] == payloads
        stamped = [int.from_bytes(value[112:120], "little") for value in received]
        assert stamped == [xxhash.xxh3_64_intdigest(payload) for payload in payloads]


@pytest.mark.parametrize("half", ["native"], indirect=True)
def test_what_cannot_be_held_is_let_go_and_said() -> None:
    assert NATIVE is not None
    whole, gaps = bytearray(8), memoryview(bytearray(8))[::2]
    with pytest.raises(BufferError):
        NATIVE.hold([whole, gaps])
    with pytest.raises(BufferError):
        NATIVE.hold([whole, b"constant"], writable=True)
    whole.append(1)  # nobody holds it
    held = NATIVE.hold([whole, b"constant"])
    with pytest.raises(BufferError):
        whole.append(1)
    held.close()
    held.close()
    whole.append(1)


def write_over(serves: Sequence[Callable[[socket.socket], None]], *, seconds: float = 5.0) -> dict[int, Reply]:
    """The replies to storing `KEYS` over a connection for each of `serves`, to a server on this machine. Raises
    StoreFault with what came before it."""
    pairs = [socket.socketpair() for _ in serves]
    threads = [threading.Thread(target=serve, args=(theirs,)) for serve, (_, theirs) in zip(serves, pairs, strict=True)]
    for thread in threads:
        thread.start()
    values, replies = values_of(KEYS), dict[int, Reply]()
    batch = Batch(range(len(KEYS)))
    commands = set_commands(values, batch.items, only_if_absent=True)
    connections = [RespConnection(ours, StoreAddress(path="/here")) for ours, _ in pairs]
    try:
        replies.update(write_values(connections, batch, values, *commands, deadline=soon(seconds)))
    finally:
        for (ours, _), thread in zip(pairs, threads, strict=True):
            ours.close()
            thread.join()
    return replies


@pytest.mark.parametrize("half", ["native"], indirect=True)
def test_each_connection_has_its_share_and_an_answer_is_its_own_values() -> None:
    commands: list[list[list[bytes]]] = [[], [], []]
    lines = [[b"+OK\r\n", b"-OOM full\r\n"], [b"$-1\r\n", b"+OK\r\n"], [b">1\r\n+m\r\n+OK\r\n", b"_\r\n"]]
    replies = write_over([answers(*each) for each in zip(lines, commands, strict=True)])
    assert replies == {0: b"OK", 1: None, 2: b"OK", 3: ErrorReply("OOM", "full"), 4: b"OK", 5: None}
    for lane, each in enumerate(commands):
        assert [words[1] for words in each] == [block_store_key(key) for key in KEYS[lane::3]]
        assert all(verified(words[2], key) for words, key in zip(each, KEYS[lane::3], strict=True))


@pytest.mark.parametrize("half", ["native"], indirect=True)
def test_a_command_begins_behind_the_value_before_and_its_value_waits_for_that_ones_answer() -> None:
    """So the server has seen the beginning, and receives the value in place."""
    early: list[bool] = []

    def serve(theirs: socket.socket) -> None:
        values = values_of(KEYS[::2])
        starts, ends = set_commands(values, range(3), only_if_absent=True)
        stream = b""
        for number in range(3):
            following = starts[number + 1] if number < 2 else b""
            until = (starts[0] if not number else b"") + bytes(values.value_bytes) + ends[number] + following
            while len(stream) < len(until):
                stream += theirs.recv(len(until) - len(stream))
            assert stream.endswith(ends[number] + following)
            early.append(bool(select.select([theirs], [], [], 0)[0]))
            stream = b""
            theirs.sendall(b"+OK\r\n")

    replies = write_over([serve, answers([b"+OK\r\n"] * 3, [])])
    assert replies == dict.fromkeys(range(6), b"OK")
    assert early == [False] * 3


@pytest.mark.parametrize("half", ["native"], indirect=True)
def test_a_fault_of_one_connection_ends_all_and_what_was_answered_counts() -> None:
    commands: list[list[bytes]] = []
    answered = threading.Event()

    def reset(theirs: socket.socket) -> None:
        answered.wait(5)
        theirs.close()

    def answer(theirs: socket.socket) -> None:
        answers([b"+OK\r\n"] * 3, commands)(theirs)
        answered.set()

    values, replies, batch = values_of(KEYS), list[tuple[int, Reply]](), Batch(range(len(KEYS)))
    starts, ends = set_commands(values, batch.items, only_if_absent=True)
    pairs = [socket.socketpair() for _ in range(2)]
    threads = [
        threading.Thread(target=serve, args=(theirs,))
        for serve, (_, theirs) in zip((reset, answer), pairs, strict=True)
    ]
    for thread in threads:
        thread.start()
    connections = [RespConnection(ours, StoreAddress(path="/here")) for ours, _ in pairs]
    with pytest.raises(StoreFault) as caught:
        replies.extend(write_values(connections, batch, values, starts, ends, deadline=soon()))
    for (ours, theirs), thread in zip(pairs, threads, strict=True):
        ours.close()
        thread.join()
        theirs.close()
    assert caught.value.reason is FaultReason.RESET
    assert replies == [(1, b"OK"), (3, b"OK"), (5, b"OK")]


@pytest.mark.parametrize("half", ["native"], indirect=True)
def test_a_silent_connection_among_others_ends_at_the_deadline() -> None:
    deadline = soon(0.2)
    with pytest.raises(StoreFault) as caught:
        write_over([answers([b"+OK\r\n"] * 3, []), lambda _: None], seconds=0.2)
    assert caught.value.reason is FaultReason.TIMEOUT
    assert deadline.expired
    assert -deadline.remaining_s() < LATE_S
