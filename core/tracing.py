"""Spans of one trace across processes: sizes and counts, never a word of anybody's text.

    client's traceparent ─▶ request (router) ─▶ attempt ─▶ prefill, decode ─▶ kv restore, kv store
                                 └─▶ queue, tokenize, lookup

A parent is named by its W3C `traceparent`, which travels in headers and tickets, so nothing here depends on threads or
tasks. Without `enable_tracing` nothing is recorded, and a client's own traceparent is passed on as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from opentelemetry.trace import Span as ApiSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | int | float | bool

_TRACEPARENT = "traceparent"
_PROPAGATOR = TraceContextTextMapPropagator()
_tracers: list[Tracer] = []
"""Of this process: one when tracing is on."""


class Span:
    """One span, from its making to `end`. A span of nothing, when tracing is off, costs nothing."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: ApiSpan | None, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent
        """Names this span to its children."""

    def set(self, **attributes: Value) -> None:
        if self._span is not None:
            self._span.set_attributes(_named(attributes))

    def note(self, event: str) -> None:
        """Something happened now."""
        if self._span is not None:
            self._span.add_event(event)

    def fail(self, what: str) -> None:
        """`what`: a kind of error, which is nobody's text."""
        if self._span is not None:
            self._span.set_status(Status(StatusCode.ERROR, what))

    def end(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What leaves the block by an exception has failed; who closes a generator has heard enough."""
        if kind is not None and kind is not GeneratorExit:
            self.fail(kind.__name__)
        self.end()


def start_span(name: str, parent: str, *, serves: bool = False, attributes: Mapping[str, Value] | None = None) -> Span:
    """A span under `parent` (empty: the first of a new trace). End it. `serves`: it answers another process."""
    if not _tracers:
        return Span(None, parent)
    context = _PROPAGATOR.extract({_TRACEPARENT: parent} if parent else {})
    kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
    span = _tracers[0].start_span(name, context=context, kind=kind, attributes=_named(attributes or {}))
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=set_span_in_context(span))
    return Span(span, carrier.get(_TRACEPARENT, parent))


def span(name: str, parent: str, **attributes: Value) -> Span:
    """The same, for a block: `with span(…) as opened`."""
    return start_span(name, parent, attributes=attributes)


def enable_tracing(tracer: Tracer) -> None:
    """Record from now on, in this process."""
    _tracers[:] = [tracer]


def disable_tracing() -> None:
    _tracers.clear()


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"whalepod.{name}": value for name, value in attributes.items()}
