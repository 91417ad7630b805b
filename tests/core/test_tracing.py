"""Spans name their parents by traceparent alone; without tracing, a client's is passed on as it came."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from whalepod.core.tracing import disable_tracing, enable_tracing, span, start_span

CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorded() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable_tracing(provider.get_tracer("test"))
    yield exporter
    disable_tracing()


def test_without_tracing_nothing_is_recorded_and_the_parent_is_passed_on() -> None:
    with span("outer", CLIENTS, tokens=3) as outer:
        outer.set(more=1)
        outer.note("something")
        outer.fail("error")
        assert outer.traceparent == CLIENTS
    assert start_span("first", "").traceparent == ""


def test_children_are_of_the_clients_trace_and_of_their_parents(recorded: InMemorySpanExporter) -> None:
    outer = start_span("outer", CLIENTS, serves=True, attributes={"tokens": 3})
    with span("inner", outer.traceparent) as inner:
        inner.set(blocks=2)
    outer.end()
    outer.end()
    second, first = recorded.get_finished_spans()
    assert [first.name, second.name] == ["outer", "inner"]
    assert first.context is not None
    assert second.context is not None
    assert first.parent is not None
    assert second.parent is not None
    assert f"{first.context.trace_id:032x}" == f"{second.context.trace_id:032x}" == CLIENTS.split("-")[1]
    assert f"{first.parent.span_id:016x}" == CLIENTS.split("-")[2]
    assert second.parent.span_id == first.context.span_id
    assert (first.kind, second.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert (dict(first.attributes or {}), dict(second.attributes or {})) == (
        {"whalepod.tokens": 3},
        {"whalepod.blocks": 2},
    )


def test_a_client_that_does_not_sample_is_left_alone(recorded: InMemorySpanExporter) -> None:
    with span("outer", CLIENTS[:-1] + "0") as outer:
        assert outer.traceparent.endswith("-00")
    assert recorded.get_finished_spans() == ()


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-01", "\x00" * 55])
def test_what_names_no_parent_begins_a_trace(recorded: InMemorySpanExporter, parent: str) -> None:
    with span("outer", parent):
        pass
    (only,) = recorded.get_finished_spans()
    assert only.parent is None


def test_what_raises_has_failed_and_what_is_closed_has_not(recorded: InMemorySpanExporter) -> None:
    def reads() -> Iterator[int]:
        with span("read", ""):
            yield 1

    reading = reads()
    next(reading)
    reading.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator
    with pytest.raises(ZeroDivisionError), span("divide", ""):
        _ = 1 // 0
    read, divide = recorded.get_finished_spans()
    assert read.status.status_code is StatusCode.UNSET
    assert (divide.status.status_code, divide.status.description) == (StatusCode.ERROR, "ZeroDivisionError")
