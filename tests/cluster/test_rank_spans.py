"""How a rank gets the rows of an image: the next source where one fails, and the truth where all do."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import grpc
import pytest
import torch

from tests.engine.engine_world import CHECKPOINT, tiny_model
from tests.engine.memory_store import MemoryStore
from tests.model.vision.pictures import encoded, noise
from whalepod.cluster import rank_spans
from whalepod.cluster.error_codes import status_of_error
from whalepod.cluster.rank_spans import RankSpans, SpanOptions
from whalepod.cluster.vision_orders import VisionCaller, by_affinity
from whalepod.core.clock import SYSTEM_CLOCK, Deadline
from whalepod.core.credentials import ClusterSecret
from whalepod.core.errors import DeadlineError, InvalidFieldError, ServingError, UnavailableError
from whalepod.engine.images import RequestImage
from whalepod.engine.inline_spans import InlineSpans, inline_spans
from whalepod.engine.span_cache import SpanCache
from whalepod.engine.span_values import pack_rows, rows_of_value, span_value, unpack_rows
from whalepod.kvstore.store_keys import span_key
from whalepod.model.vision.encoder import VisionEncoder
from whalepod.model.vision.grid import ImageGrid
from whalepod.model.vision.pixels import patches_of_bytes
from whalepod.model.vision.preparation import content_hash
from whalepod.rpc.vision.v1 import vision_pb2, vision_pb2_grpc

CALLER = VisionCaller("tiny", b"a namespace here", ClusterSecret(b"the secret of a test cluster"), SYSTEM_CLOCK)
OPTIONS = SpanOptions(store_s=60.0, timeout_s=5.0)


@cache
def encoder() -> VisionEncoder:
    return VisionEncoder.load(CHECKPOINT)


@cache
def inline() -> InlineSpans:
    found = inline_spans(CHECKPOINT, tiny_model())
    assert found is not None
    return found


def picture(seed: int = 0) -> RequestImage:
    data = encoded(noise(40, 28, seed=seed), "WEBP")
    vision = tiny_model().config.vision_config
    assert vision is not None
    tokens = ImageGrid.fit(40, 28, vision).tokens
    return RequestImage(0, tokens, content_hash(data, 40, 28), data, 40, 28)


def truth(image: RequestImage) -> torch.Tensor:
    return inline().rows(image, encoders=(), deadline=Deadline.after(60))


def spans(store: MemoryStore | None = None, *, encodes: bool = False, timeout_s: float = 5.0) -> RankSpans:
    options = SpanOptions(store_s=60.0, timeout_s=timeout_s)
    return RankSpans(tiny_model(), options, caller=CALLER, store=store, inline=inline() if encodes else None)


class FakeVision(vision_pb2_grpc.VisionServiceServicer):
    def __init__(self, answer: Callable[[vision_pb2.EncodeOrder], bytes | ServingError]) -> None:
        self.answer = answer
        self.asked = 0

    def Encode(self, request: vision_pb2.EncodeRequest, context: Any) -> vision_pb2.EncodeResponse:
        self.asked += 1
        answer = self.answer(CALLER.verified(request))
        if isinstance(answer, ServingError):
            status, message, metadata = status_of_error(answer)
            context.set_trailing_metadata(metadata)
            context.abort(status, message)
            raise AssertionError("unreachable")
        return vision_pb2.EncodeResponse(rows=answer, tokens=0)


@contextmanager
def serving(*ranks: FakeVision) -> Generator[list[str], None, None]:
    servers: list[grpc.Server] = []
    addresses: list[str] = []
    for rank in ranks:
        server = grpc.server(ThreadPoolExecutor(4))
        vision_pb2_grpc.add_VisionServiceServicer_to_server(rank, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        server.start()
        servers.append(server)
    try:
        yield addresses
    finally:
        for server in servers:
            server.stop(None)


def right(image: RequestImage) -> Callable[[vision_pb2.EncodeOrder], bytes]:
    return lambda _: pack_rows(truth(image))


def answers(order: vision_pb2.EncodeOrder) -> bytes:
    (rows,) = encoder().encode([patches_of_bytes(order.data, encoder().config)])
    return pack_rows(rows)


def test_a_vision_rank_is_asked_once_and_then_it_is_known_here() -> None:
    image, rank = picture(), FakeVision(right(picture()))
    with serving(rank) as addresses:
        source = spans()
        for _ in range(3):
            assert torch.equal(source.rows(image, encoders=addresses, deadline=Deadline.after(10)), truth(image))
        assert rank.asked == 1
        source.close()


def test_the_store_is_asked_before_anybody() -> None:
    image, store = picture(), MemoryStore()
    store.snapshots[span_key(image.rows_name)] = span_value(truth(image), owner=0)
    assert torch.equal(spans(store).rows(image, encoders=(), deadline=Deadline.after(10)), truth(image))


@pytest.mark.parametrize("failure", ["dead", "full", "short"])
def test_where_one_fails_the_next_is_asked(failure: str) -> None:
    image = picture()
    good = FakeVision(right(image))
    bad = FakeVision(lambda _: UnavailableError("draining") if failure == "full" else b"short")
    with serving(good, bad) as addresses:
        places = ["127.0.0.1:1" if failure == "dead" else addresses[1], addresses[0]]
        # Whichever is asked first: an image whose first is the bad one.
        image = next(i for i in map(picture, range(40)) if by_affinity(places, i.content_hash)[0] == places[0])
        good.answer = right(image)
        source = spans()
        assert torch.equal(source.rows(image, encoders=places, deadline=Deadline.after(20)), truth(image))
        source.close()


def test_a_rank_that_says_nothing_costs_a_moment_and_is_asked_last_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_spans, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(rank_spans, "PROBE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stopped, serving(FakeVision(answers)) as addresses:
        places = [f"127.0.0.1:{stopped.getsockname()[1]}", *addresses]
        images = [one for one in map(picture, range(40)) if by_affinity(places, one.content_hash)[0] == places[0]]
        source = spans(timeout_s=60.0)
        failures = rank_spans.VISION_FAILURES._value.get()
        for image in images[:4]:
            assert torch.equal(source.rows(image, encoders=places, deadline=Deadline.after(60)), truth(image))
        assert rank_spans.VISION_FAILURES._value.get() - failures == 1
        source.close()


def test_where_all_fail_the_request_is_told_and_who_can_encodes_itself() -> None:
    image, store = picture(), MemoryStore()
    with pytest.raises(UnavailableError, match=r"no vision rank .*127\.0\.0\.1:1"):
        spans().rows(image, encoders=["127.0.0.1:1"], deadline=Deadline.after(20))
    with pytest.raises(UnavailableError, match="there is none"):
        spans().rows(image, encoders=(), deadline=Deadline.after(20))
    rows = spans(store, encodes=True).rows(image, encoders=["127.0.0.1:1"], deadline=Deadline.after(20))
    assert torch.equal(rows, truth(image))
    assert span_key(image.rows_name) in store.snapshots, "for whoever needs it next"


def test_a_bad_image_is_asked_about_once_and_a_late_answer_is_late() -> None:
    image = picture()
    refuses = FakeVision(lambda _: InvalidFieldError("image", "the image cannot be decoded"))
    with serving(refuses, FakeVision(right(image))) as addresses:
        places = sorted(addresses, key=lambda address: address != addresses[0])
        image = next(i for i in map(picture, range(40)) if by_affinity(places, i.content_hash)[0] == addresses[0])
        with pytest.raises(InvalidFieldError):
            spans().rows(image, encoders=places, deadline=Deadline.after(10))
    with pytest.raises(DeadlineError):
        spans().rows(image, encoders=["127.0.0.1:1"], deadline=Deadline.after(0))


# ----------------------------------------------------------------------------------------------------- values and cache


def test_a_value_of_another_kind_or_size_is_no_span() -> None:
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        kept = rows.to(dtype)
        found = rows_of_value(span_value(kept, owner=0), tokens=5, width=8, dtype=dtype)
        assert found is not None
        assert torch.equal(found, kept)
    assert rows_of_value(span_value(rows, owner=0), tokens=4, width=8, dtype=torch.float32) is None
    assert rows_of_value(None, tokens=5, width=8, dtype=torch.float32) is None
    assert unpack_rows(b"", tokens=0, width=8, dtype=torch.float32) is None
    for none in (float("nan"), float("inf")):
        rows[3, 5] = none
        assert unpack_rows(pack_rows(rows), tokens=5, width=8, dtype=torch.float32) is None


def test_the_cache_forgets_the_oldest_and_never_holds_more_than_it_may() -> None:
    forgotten: list[int] = []
    held = SpanCache(10, on_forget=lambda: forgotten.append(1))

    def get(key: bytes, tokens: int) -> bool:
        """Whether it was made anew."""
        made: list[bytes] = []

        def make() -> torch.Tensor:
            made.append(key)
            return torch.zeros(tokens, 1)

        held.rows(key, make, deadline=Deadline.after(10))
        assert held.rows_held <= 10
        return bool(made)

    assert [get(b"a", 4), get(b"b", 4), get(b"a", 4), get(b"c", 4)] == [True, True, False, True]
    assert [get(b"a", 4), get(b"b", 4)] == [False, True]
    assert len(forgotten) == 2
    assert [get(b"large", 11), get(b"large", 11)] == [True, True], "too large to hold"


def test_who_has_time_left_does_not_end_with_one_who_had_none() -> None:
    held, begun, end = SpanCache(10), threading.Event(), threading.Event()

    def late() -> torch.Tensor:
        begun.set()
        end.wait(10)
        raise DeadlineError("too late")

    with ThreadPoolExecutor(2) as pool:
        hurried = pool.submit(held.rows, b"a", late, deadline=Deadline.after(10))
        assert begun.wait(10)
        patient = pool.submit(held.rows, b"a", lambda: torch.zeros(3, 1), deadline=Deadline.after(10))
        end.set()
        with pytest.raises(DeadlineError):
            hurried.result(10)
        assert len(patient.result(10)) == 3


def test_an_error_is_told_to_all_who_wait_and_the_next_one_tries_again() -> None:
    held = SpanCache(10)

    def fails() -> torch.Tensor:
        raise UnavailableError("not now")

    with pytest.raises(UnavailableError):
        held.rows(b"a", fails, deadline=Deadline.after(10))
    assert len(held.rows(b"a", lambda: torch.zeros(3, 1), deadline=Deadline.after(10))) == 3
