"""Batches of values over one connection, read by the native half and by Python alone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
import xxhash

from tests.kvstore.test_store_faults import LATE_S
from tests.kvstore.test_value_format import resealed
from tests.kvstore.values import LAYOUT, NAMESPACE, buffers, chain, payload_of, soon
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.ids import Incarnation
from whalepod.kvstore import pipeline
from whalepod.kvstore.faults import FaultReason, StoreFault
from whalepod.kvstore.native_library import NATIVE
from whalepod.kvstore.native_reads import Foreseen, Reading, Requests, Verdict
from whalepod.kvstore.pipeline import Batch, Flight, read_values
from whalepod.kvstore.plain_block_headers import PlainBlockHeaders, identities_of
from whalepod.kvstore.redis_transport import get_requests
from whalepod.kvstore.resp import RespConnection, command
from whalepod.kvstore.settings import StoreAddress, StoreSettings
from whalepod.kvstore.store_keys import block_store_key
from whalepod.kvstore.value_mac import ValueMac
from whalepod.kvstore.value_sinks import WantedBlocks
from whalepod.kvstore.value_writer import ValueWriter

KEYS = chain(6)
MAC = ValueMac(b"m" * 32)
Ends = tuple[RespConnection, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    connection = RespConnection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


@pytest.fixture(params=["native", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(pipeline, "NATIVE", None)
    elif NATIVE is None:
        pytest.skip("the native half was not built here")
    return request.param


pytestmark = pytest.mark.usefixtures("reader")


@dataclass
class Read:
    """What came of reading `KEYS`."""

    blocks: WantedBlocks
    answered: bytearray
    fault: StoreFault | None = None
    moved: int = field(default=0)

    @property
    def verified(self) -> list[bool]:
        return [verdict != Verdict.NONE for verdict in self.blocks.verdicts]


def value_of(index: int, *, mac: ValueMac | None = None) -> bytes:
    writer = ValueWriter(NAMESPACE, LAYOUT, Incarnation(1), StoreSettings(), SYSTEM_CLOCK, mac)
    value = writer.block(KEYS[index], (payload_of(KEYS[index]),), exact=True)
    return b"".join(bytes(piece) for piece in value.pieces)


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def read(
    ends: Ends,
    serve: Callable[[socket.socket], None],
    *,
    mac: ValueMac | None = None,
    deadline: Deadline | None = None,
    alone: bool = False,
) -> Read:
    """Read all of `KEYS` from what `serve` sends."""
    connection, theirs = ends
    headers = PlainBlockHeaders(NAMESPACE, LAYOUT, signed=mac is not None)
    blocks = WantedBlocks(KEYS, buffers(len(KEYS)), headers, mac=mac)
    sinks, batch = blocks.batch(range(len(KEYS))), Batch(range(len(KEYS)))
    result = Read(blocks, bytearray(len(KEYS)))
    deadline = deadline or soon()
    requests = get_requests(sinks.keys)
    flight = Flight(connection, requests, item_bytes=LAYOUT.payload_bytes, deadline=deadline, alone=alone)
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    try:
        result.moved = read_values(connection, batch, sinks, result.answered, flight, deadline=deadline)
    except StoreFault as fault:
        result.fault = fault
    thread.join()
    return result


def sends(*replies: bytes) -> Callable[[socket.socket], None]:
    return lambda theirs: theirs.sendall(b"".join(replies))


def test_values_arrive_in_place(ends: Ends) -> None:
    done = read(ends, sends(*(bulk(value_of(index)) for index in range(6))))
    assert done.verified == list(map(bool, done.answered)) == [True] * 6
    assert done.moved == 6 * (256 + LAYOUT.payload_bytes)
    assert [bytes(buffer) for buffer in done.blocks.buffers] == [payload_of(key) for key in KEYS]


def test_signed_values_arrive_in_place(ends: Ends) -> None:
    done = read(ends, sends(*(bulk(value_of(index, mac=MAC)) for index in range(6))), mac=MAC)
    assert done.verified == [True] * 6


def test_a_signed_value_among_others_is_longer_and_as_good(ends: Ends) -> None:
    values = [value_of(index, mac=MAC if index == 2 else None) for index in range(6)]
    assert read(ends, sends(*map(bulk, values))).verified == [True] * 6


OTHER_REPLIES = {
    "null": b"$-1\r\n",
    "null3": b"_\r\n",
    "error": b"-ERR no\r\n",
    "short": bulk(b"x" * 100),
    "empty": bulk(b""),
    "longer": bulk(value_of(2) + b"x"),
    "pushed null": b">1\r\n+m\r\n$-1\r\n",
}


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("reply", OTHER_REPLIES.values(), ids=OTHER_REPLIES.keys())
def test_another_reply_at_any_place_costs_its_own_block_and_no_other(ends: Ends, reply: bytes, place: int) -> None:
    replies = [bulk(value_of(index)) for index in range(6)]
    replies[place] = reply
    done = read(ends, sends(*replies))
    assert done.fault is None
    assert done.verified == [index != place for index in range(6)]


def test_replies_that_come_byte_by_byte_are_understood(ends: Ends) -> None:
    stream = b"".join([bulk(value_of(0)), b"$-1\r\n", *(bulk(value_of(index)) for index in range(2, 6))])

    def drip(theirs: socket.socket) -> None:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for at in range(0, len(stream), 97):
            theirs.sendall(stream[at : at + 97])

    assert read(ends, drip).verified == [True, False, True, True, True, True]


def test_a_value_of_wrong_bytes_is_refused(ends: Ends) -> None:
    replies = [bulk(value_of(index)) for index in range(6)]
    replies[3] = replies[3][:-9] + b"\0" * 7 + b"\r\n"
    replies[4] = replies[5]
    assert read(ends, sends(*replies)).verified == [True, True, True, False, False, True]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (bulk(value_of(0)) + bulk(value_of(1))[:-2] + b"xx", FaultReason.PROTOCOL),
        (bulk(value_of(0)) + bulk(value_of(1))[:3000], FaultReason.RESET),
        (bulk(value_of(0)) + b"$52", FaultReason.RESET),
        (bulk(value_of(0)), FaultReason.RESET),
        (bulk(value_of(0)) + b"?\r\n", FaultReason.PROTOCOL),
    ],
)
def test_what_had_arrived_before_a_broken_stream_counts(ends: Ends, stream: bytes, reason: FaultReason) -> None:
    def serve(theirs: socket.socket) -> None:
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)

    done = read(ends, serve)
    assert done.fault is not None
    assert done.fault.reason is reason
    assert done.verified == [True] + [False] * 5


@pytest.mark.parametrize("cut", [0, 3, 150, 3000, -1])
def test_a_stream_that_stops_ends_at_the_deadline(cut: int) -> None:
    serve = sends(bulk(value_of(0)), bulk(value_of(1))[:cut])
    late_s: list[float] = []
    # What is late by its making is so every time, what a busy machine holds up is not.
    while len(late_s) < 3 and (not late_s or late_s[-1] >= LATE_S):
        late_s.append(lateness_beside_a_sleeper(serve, soon(0.3)))
    assert late_s[-1] < LATE_S, late_s


def lateness_beside_a_sleeper(serve: Callable[[socket.socket], None], deadline: Deadline) -> float:
    """Seconds past its deadline that a read which times out after one value ended, less what a thread that only slept
    until then was late itself."""
    slept_s: list[float] = []

    def sleep() -> None:
        threading.Event().wait(deadline.remaining_s())
        slept_s.append(SYSTEM_CLOCK.monotonic_s() - deadline.at_s)

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    ours, theirs = socket.socketpair()
    connection = RespConnection(ours)
    done = read((connection, theirs), serve, deadline=deadline)
    late_s = SYSTEM_CLOCK.monotonic_s() - deadline.at_s
    sleeper.join()
    connection.close()
    theirs.close()
    assert done.fault is not None
    assert done.fault.reason is FaultReason.TIMEOUT
    assert done.verified == [True] + [False] * 5
    assert late_s > -0.02, "it waits for what may still come"
    return late_s - max(0.0, slept_s[0])


def test_requests_go_out_a_few_ahead_of_the_answers(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "IN_FLIGHT_BYTES", 2 * LAYOUT.payload_bytes)
    ahead: list[int] = []

    def serve(theirs: socket.socket) -> None:
        asked = b""
        for index in range(6):
            while asked.count(b"GET") <= index:
                asked += theirs.recv(4096)
            theirs.setblocking(False)
            try:
                asked += theirs.recv(4096)
            except BlockingIOError:
                pass
            theirs.setblocking(True)
            ahead.append(asked.count(b"GET") - index)
            theirs.sendall(bulk(value_of(index)))

    assert read(ends, serve).verified == [True] * 6
    assert max(ahead) == 2


@pytest.mark.parametrize("absent", [(0,), (2,), (1, 3), (5,)])
def test_no_request_is_sent_twice_however_many_were_on_their_way_when_another_reply_came(
    ends: Ends, absent: Sequence[int]
) -> None:
    replies = [b"$-1\r\n" if index in absent else bulk(value_of(index)) for index in range(6)]
    assert read(ends, sends(*replies)).verified == [index not in absent for index in range(6)]
    assert ends[1].recv(1 << 16) == b"".join(command(b"GET", block_store_key(key)) for key in KEYS)


def test_some_blocks_of_those_wanted_are_read_and_no_other_is_touched(ends: Ends) -> None:
    connection, theirs = ends
    blocks = WantedBlocks(KEYS, buffers(len(KEYS)), PlainBlockHeaders(NAMESPACE, LAYOUT))
    sinks = blocks.batch([4, 1, 3])
    values = [value_of(4, mac=MAC), value_of(3)]  # the one between them was asked about elsewhere
    theirs.sendall(b"".join(map(bulk, values)))
    flight = Flight(connection, get_requests(sinks.keys[::2]), item_bytes=LAYOUT.payload_bytes, deadline=soon())
    answered = bytearray(3)
    read_values(connection, Batch([0, 2]), sinks, answered, flight, deadline=soon())
    assert (list(answered), list(blocks.verdicts)) == ([1, 0, 1], [0, 0, 0, Verdict.EXACT, Verdict.EXACT, 0])
    right = [payload_of(key) if index in (3, 4) else bytes(LAYOUT.payload_bytes) for index, key in enumerate(KEYS)]
    assert [bytes(buffer) for buffer in blocks.buffers] == right


@pytest.mark.parametrize("alone", [True, False])
def test_a_local_server_gets_one_request_at_a_time_the_next_when_a_reply_begins_or_has_ended(alone: bool) -> None:
    ours, theirs = socket.socketpair()
    connection = RespConnection(ours, StoreAddress(path="/run/redis.sock"))
    asked_meanwhile: list[bool] = []

    def serve(theirs: socket.socket) -> None:
        theirs.recv(4096)
        for index in range(6):
            reply = bulk(value_of(index))
            theirs.sendall(reply[:100])
            theirs.settimeout(5 if alone else 0.02)
            try:
                asked_meanwhile.append(index < 5 and theirs.recv(4096).count(b"GET") == 1)
            except TimeoutError:
                asked_meanwhile.append(False)
            theirs.settimeout(5)
            theirs.sendall(reply[100:])
            if not alone and index < 5:
                assert theirs.recv(4096).count(b"GET") == 1

    assert read((connection, theirs), serve, alone=alone).verified == [True] * 6
    assert asked_meanwhile == [alone and index < 5 for index in range(6)]
    connection.close()
    theirs.close()


def natively(values: Sequence[bytes], *, plain: bytes, exact_only: bool = False) -> tuple[list[int], list[int]]:
    """Verdicts and hashes that the C half gives values which should all be block 0 with a header as `plain`."""
    assert NATIVE is not None
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=lambda: theirs.sendall(b"".join(map(bulk, values))))
    sender.start()
    count, size = len(values), LAYOUT.payload_bytes
    foreseen = Foreseen(256, size, buffers(count), plain, identities_of([KEYS[0]] * count), exact_only)
    reading = Reading(NATIVE, foreseen, Requests(count, b"", 0), ahead=count, early=False)
    arrived = reading.proceed(ours.fileno(), (bytearray(64), 0, 0), sent=count, timeout_s=5)
    reading.close()
    sender.join()
    ours.close()
    theirs.close()
    assert (arrived.fault, reading.done) == (None, count)
    return list(reading.verdicts(0)), list(reading.payload_hashes)


PLAIN = PlainBlockHeaders(NAMESPACE, LAYOUT).plain


@pytest.mark.skipif(NATIVE is None, reason="the native half was not built here")
def test_the_hash_taken_on_the_way_is_the_payloads() -> None:
    verdicts, hashes = natively([value_of(0), value_of(1)], plain=b"")
    assert hashes == [xxhash.xxh3_64_intdigest(payload_of(key)) for key in KEYS[:2]]
    assert verdicts == [Verdict.NONE, Verdict.NONE]


@pytest.mark.skipif(NATIVE is None, reason="the native half was not built here")
def test_the_c_half_accepts_what_the_python_half_accepts_and_no_changed_byte() -> None:
    headers, value = PlainBlockHeaders(NAMESPACE, LAYOUT), value_of(0)
    payload_at = [256 + at for at in (0, 1, 2047, 2048, LAYOUT.payload_bytes - 1)]
    changed = [bytes([*value[:at], value[at] ^ 1, *value[at + 1 :]]) for at in (*range(256), *payload_at)]
    sealed = [resealed(value[:256], at, bytes([value[at] ^ 1])) + value[256:] for at in range(252)]
    assert set(natively(changed, plain=PLAIN)[0]) == {Verdict.NONE}
    for exact_only in (False, True):
        for each, verdict in zip(sealed, natively(sealed, plain=PLAIN, exact_only=exact_only)[0], strict=True):
            read = headers.read(each[:256], KEYS[0], value_bytes=len(each))
            right = read is not None and read[0] == xxhash.xxh3_64_intdigest(each[256:])
            exact = read is not None and read[1]
            wanted = right and (exact or not exact_only)
            assert verdict == (Verdict.NONE if not wanted else Verdict.EXACT if exact else Verdict.APPROXIMATE)
    assert natively([value, value_of(1)], plain=PLAIN)[0] == [Verdict.EXACT, Verdict.NONE]


def test_any_mixture_in_any_pieces_is_read_alike_by_both(
    reader: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python alone makes of a stream is what was meant; `reader` makes the same of it."""
    draw = Random(7)
    for _ in range(60):
        monkeypatch.setattr(pipeline, "IN_FLIGHT_BYTES", draw.choice((1, 3, 100)) * LAYOUT.payload_bytes)
        whole = [draw.random() < 0.7 for _ in KEYS]
        replies = [
            bulk(value_of(index)) if right else draw.choice(list(OTHER_REPLIES.values()))
            for index, right in enumerate(whole)
        ]
        stream, cuts = b"".join(replies), sorted(draw.randrange(20_000) for _ in range(draw.randint(0, 12)))
        pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]

        def serve(theirs: socket.socket, pieces: list[bytes] = pieces) -> None:
            for piece in pieces:
                theirs.sendall(piece)

        done = read(ends, serve)
        assert (done.fault, done.verified) == (None, whole)
        assert done.answered[0] or replies[0].startswith(b"-")
        ends[1].recv(1 << 16)  # what was asked
