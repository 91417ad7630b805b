"""The spans of one handed-off prompt, over real ranks: each under its own rank's, both under the router's attempt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.services.rank_world import (
    GREEDY,
    TestRouter,
    decode_stream,
    prompt_of,
    run_prefill,
    running_rank,
    until,
    world_config,
)
from whalepod.core.tracing import disable_tracing, enable_tracing

ROUTERS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorded() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    enable_tracing(provider.get_tracer("test"))
    yield exporter
    disable_tracing()


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id


async def test_a_hand_off_is_one_trace_over_prefill_store_and_decode(
    redis_port: int, recorded: InMemorySpanExporter
) -> None:
    config = world_config(redis_port)
    async with running_rank(config, "prefill") as prefill, running_rank(config, "decode") as decode:
        ticket = TestRouter(decode.info).ticket(
            prompt_of(101), replace(GREEDY, max_tokens=4), prefill="prefill-0", traceparent=ROUTERS
        )
        async with decode_stream(decode.info.address) as stream:
            key = stream.start(ticket)
            stream.ready(key, await run_prefill(prefill.info.address, ticket))
            await stream.end_of(key)

        async def all_ended() -> bool:
            return {"prefill", "kv store", "decode", "kv restore"} <= {
                one.name for one in recorded.get_finished_spans()
            }

        await until(all_ended)
    spans = {one.name: one for one in recorded.get_finished_spans()}
    assert {f"{one.context.trace_id:032x}" for one in spans.values() if one.context} == {ROUTERS.split("-")[1]}
    router = int(ROUTERS.split("-")[2], 16)
    parents = {name: one.parent.span_id for name, one in spans.items() if one.parent is not None}
    assert (parents["prefill"], parents["decode"]) == (router, router)
    assert parents["kv store"] == span_id(spans["prefill"])
    assert parents["kv restore"] == span_id(spans["decode"])
    assert dict(spans["kv restore"].attributes or {})["whalepod.snapshot"] is True
    assert dict(spans["decode"].attributes or {})["whalepod.reason"] == "length"
    assert [event.name for event in spans["decode"].events] == ["handed off"]
