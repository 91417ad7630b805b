from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kvstore.values import soon
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.kvstore.faults import ErrorReply, FaultReason, StoreFault
from whalepod.kvstore.resp import RespConnection, command, gather


@pytest.fixture
def ends() -> Iterator[tuple[RespConnection, socket.socket]]:
    """A connection and the server's end of it."""
    ours, theirs = socket.socketpair()
    connection = RespConnection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


Ends = tuple[RespConnection, socket.socket]


def fault_of(connection: RespConnection, *, deadline: Deadline | None = None) -> FaultReason:
    with pytest.raises(StoreFault) as caught:
        connection.read_reply(deadline=deadline or soon())
    return caught.value.reason


def test_a_command_is_framed_by_lengths() -> None:
    assert command(b"SET", b"k\r\n", b"") == b"*3\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$0\r\n\r\n"
    assert b"".join(gather(b"SET", b"k", (b"ab", b"", memoryview(b"c")), b"NX")) == command(b"SET", b"k", b"abc", b"NX")


def test_pieces_of_a_gathered_word_are_not_copied() -> None:
    payload = memoryview(b"payload")
    assert any(piece is payload for piece in gather(b"SET", b"k", (b"head", payload)))


REPLIES = [
    (b"+OK\r\n", b"OK"),
    (b":-12\r\n", -12),
    (b"$5\r\nhello\r\n", b"hello"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"-OOM command not allowed\r\n", ErrorReply("OOM", "command not allowed")),
    (b"-READONLY no script: f_a, on @user_script:3.\r\n", ErrorReply("READONLY", "no script: f_a, on @user_script:3.")),
    (
        b"-ERR Error running script (call to f_a): @user_script:3: @user_script: 3: -OOM no: not now\r\n",
        ErrorReply("OOM", "no: not now"),
    ),
    (
        b"-ERR Error running script (call to f_a): @user_script:3: @user_script: 3: WRONGTYPE no\r\n",
        ErrorReply("WRONGTYPE", "no"),
    ),
    (
        b"-ERR Error running script (call to f_a): @user_script:3: it is wrong\r\n",
        ErrorReply("ERR", "Error running script (call to f_a): @user_script:3: it is wrong"),
    ),
    (b"-ERR " + b"y" * 3000 + b"\r\n", ErrorReply("ERR", "y" * 200)),
    (b"*3\r\n:1\r\n$1\r\na\r\n*1\r\n_\r\n", [1, b"a", [None]]),
    (b"*0\r\n", []),
    (b">2\r\n+invalidate\r\n*1\r\n+k\r\n+OK\r\n", b"OK"),
]


@pytest.mark.parametrize(("raw", "reply"), REPLIES)
def test_replies_are_read_whole(ends: Ends, raw: bytes, reply: object) -> None:
    connection, server = ends
    server.sendall(raw + b":7\r\n")
    assert connection.read_reply(deadline=soon()) == reply
    assert connection.read_reply(deadline=soon()) == 7


def test_replies_that_arrive_byte_by_byte_are_the_same(ends: Ends) -> None:
    connection, server = ends
    raw = b"".join(raw for raw, _ in REPLIES)
    sender = threading.Thread(target=lambda: [server.sendall(raw[at : at + 1]) for at in range(len(raw))])
    sender.start()
    assert [connection.read_reply(deadline=soon()) for _ in REPLIES] == [reply for _, reply in REPLIES]
    sender.join()


@pytest.mark.parametrize(
    "raw",
    [
        b"!\r\n", b"$x\r\n", b":1.5\r\n", b"$-\r\n", b":\r\n", b"*99999999\r\n", b"$99999999999999999999\r\n",
        b"$2000000\r\n", b"$-2\r\n", b"*-2\r\n",
        b"$3\r\nabcd\r\n", b"*1\r\n" * 9, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+" + b"x" * 20000,
        ":１\r\n".encode(),
    ],
)  # fmt: skip
def test_what_is_not_a_reply_puts_the_connection_in_doubt(ends: Ends, raw: bytes) -> None:
    connection, server = ends
    server.sendall(raw)
    assert fault_of(connection) is FaultReason.PROTOCOL


@pytest.mark.parametrize("raw", [b"", b"$5\r\nhel", b"$5\r\nhello", b"*2\r\n:1\r\n", b"+OK\r"])
def test_a_stream_that_ends_early_is_a_fault(ends: Ends, raw: bytes) -> None:
    connection, server = ends
    server.sendall(raw)
    server.shutdown(socket.SHUT_WR)
    assert fault_of(connection) is FaultReason.RESET


@pytest.mark.parametrize("raw", [b"", b"$5\r\nhel", b"*2\r\n:1\r\n"])
def test_a_stream_that_stalls_is_a_fault_at_the_deadline(ends: Ends, raw: bytes) -> None:
    connection, server = ends
    server.sendall(raw)
    start_s = SYSTEM_CLOCK.monotonic_s()
    assert fault_of(connection, deadline=soon(0.05)) is FaultReason.TIMEOUT
    assert SYSTEM_CLOCK.monotonic_s() - start_s < 0.1


def test_a_trickle_does_not_stretch_the_deadline(ends: Ends) -> None:
    connection, server = ends
    stop = threading.Event()

    def trickle() -> None:
        server.sendall(b"$100000\r\n")
        while not stop.wait(0.01):
            server.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    start_s = SYSTEM_CLOCK.monotonic_s()
    assert fault_of(connection, deadline=soon(0.1)) is FaultReason.TIMEOUT
    assert SYSTEM_CLOCK.monotonic_s() - start_s < 0.15
    stop.set()
    sender.join()


@pytest.mark.parametrize(
    "talk",
    [
        lambda connection: connection.read_reply(deadline=soon(0.1)),
        lambda connection: connection.send([bytes(1 << 20)] * 64, deadline=soon(0.1)),
    ],
    ids=["receive", "send"],
)
def test_signals_do_not_stretch_the_deadline(ends: Ends, talk: Callable[[RespConnection], object]) -> None:
    """Python takes up again a call that a signal has interrupted."""
    connection, _ = ends
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    guard = threading.Timer(2.0, connection.close)
    guard.start()
    try:
        start_s = SYSTEM_CLOCK.monotonic_s()
        with pytest.raises(StoreFault) as caught:
            talk(connection)
        took_s = SYSTEM_CLOCK.monotonic_s() - start_s
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        guard.cancel()
    assert (caught.value.reason, took_s < 0.5) == (FaultReason.TIMEOUT, True)


def test_a_stall_after_some_progress_still_ends_at_the_deadline(ends: Ends) -> None:
    connection, server = ends
    server.sendall(b"$100000\r\n")
    later = threading.Timer(0.15, server.sendall, [b"x" * 50000])
    later.start()
    start_s = SYSTEM_CLOCK.monotonic_s()
    assert fault_of(connection, deadline=soon(0.2)) is FaultReason.TIMEOUT
    assert SYSTEM_CLOCK.monotonic_s() - start_s < 0.25
    later.join()


def test_a_peer_that_does_not_read_stops_a_send_at_its_deadline(ends: Ends) -> None:
    connection, _ = ends
    with pytest.raises(StoreFault) as caught:
        connection.send([bytes(1 << 20)] * 64, deadline=soon(0.1))
    assert caught.value.reason is FaultReason.TIMEOUT


def test_a_gather_write_of_many_pieces_arrives_in_order(ends: Ends) -> None:
    connection, server = ends
    pieces = [bytes([number % 256]) * (number % 700) for number in range(3000)]
    received = bytearray()

    def receive() -> None:
        while len(received) < sum(map(len, pieces)):
            received.extend(server.recv(1 << 16))

    reader = threading.Thread(target=receive)
    reader.start()
    connection.send(pieces, deadline=soon())
    reader.join()
    assert received == b"".join(pieces)


def test_a_value_lands_in_the_callers_memory_wherever_the_reads_ended(ends: Ends) -> None:
    connection, server = ends
    value = bytes(range(256)) * 40
    for _ in range(3):
        server.sendall(b"$%d\r\n" % len(value) + value + b"\r\n+next\r\n")
        place = bytearray(len(value))
        assert connection.read_value_length(deadline=soon()) == len(value)
        connection.read_into(memoryview(place)[:100], deadline=soon())
        connection.read_into(memoryview(place)[100:], deadline=soon())
        connection.end_value(deadline=soon())
        assert place == value
        assert connection.read_reply(deadline=soon()) == b"next"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(b"$-1\r\n", None), (b"_\r\n", None), (b"-LOADING x\r\n", ErrorReply("LOADING", "x")), (b">1\r\n+p\r\n$4\r\n", 4)],
)
def test_instead_of_a_value_there_may_be_a_null_an_error_or_a_message(ends: Ends, raw: bytes, expected: object) -> None:
    connection, server = ends
    server.sendall(raw)
    assert connection.read_value_length(deadline=soon()) == expected


@pytest.mark.parametrize("raw", [b":1\r\n", b"+OK\r\n", b"*1\r\n+x\r\n"])
def test_another_reply_where_a_value_belongs_is_a_fault(ends: Ends, raw: bytes) -> None:
    connection, server = ends
    server.sendall(raw)
    with pytest.raises(StoreFault):
        connection.read_value_length(deadline=soon())


def test_a_connection_is_quiet_only_when_nothing_waits(ends: Ends) -> None:
    connection, server = ends
    assert connection.quiet
    server.sendall(b"+late\r\n")
    assert not connection.quiet
    assert connection.read_reply(deadline=soon()) == b"late"
    assert connection.quiet
    server.close()
    assert not connection.quiet


@given(st.binary(max_size=400))
def test_any_bytes_are_replies_or_a_fault(raw: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(raw)
        theirs.shutdown(socket.SHUT_WR)
        connection = RespConnection(ours)
        with pytest.raises(StoreFault):
            _ = [connection.read_reply(deadline=soon()) for _ in range(len(raw) + 1)]  # a reply takes a byte at least


@given(st.lists(st.sampled_from([raw for raw, _ in REPLIES]), max_size=8), st.binary(max_size=30))
def test_replies_before_junk_are_still_right(raws: list[bytes], junk: bytes) -> None:
    expected = dict(REPLIES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"".join(raws) + junk)
        connection = RespConnection(ours)
        assert [connection.read_reply(deadline=soon()) for _ in raws] == [expected[raw] for raw in raws]
