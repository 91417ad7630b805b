"""Where a process sends its spans: a collector that speaks OTLP over gRPC."""

from __future__ import annotations

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from whalepod import __version__
from whalepod.core.tracing import enable_tracing

from .config import TracingSettings

SEND_EVERY_MS = 1000
SPANS_WAITING_MAX = 8192
"""More than a slow collector takes are dropped."""


def configure_tracing(settings: TracingSettings, *, role: str, name: str) -> None:
    """Send this process's spans, if the operator wants any. `role`: router, prefill, decode; `name`: which one."""
    if settings.otlp_endpoint is None:
        return
    # Only who sends spans pays for the exporter's start.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    resource = Resource.create(
        {"service.name": f"whalepod-{role}", "service.instance.id": name, "service.version": __version__}
    )
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)))
    exporter = OTLPSpanExporter(settings.otlp_endpoint, insecure=settings.otlp_endpoint.startswith("http://"))
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=SPANS_WAITING_MAX, schedule_delay_millis=SEND_EVERY_MS)
    )
    enable_tracing(provider.get_tracer("whalepod", __version__))
