"""One request, one trace: router, prefill, store and decode, at a collector that speaks OTLP. Never a word of text."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.e2e.served_cluster import ServedCluster, served_cluster
from whalepod.core.clock import Deadline

pytestmark = pytest.mark.slow

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENTS = f"00-{TRACE}-b7ad6b7169203331-01"
WORDS = "The whale swam on, and the sea was quiet about it. "


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Spans of the client's trace: (service, name) to span, and everything as text."""

    spans: dict[tuple[str, str], Any] = field(default_factory=dict)
    text: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def Export(self, request: Any, context: Any) -> Any:
        with self.changed:
            self.text += str(request)
            for resource in request.resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for one in scope.spans:
                        if one.trace_id.hex() == TRACE:
                            self.spans[names["service.name"], one.name] = one
            self.changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, int]]:
    server = grpc.server(ThreadPoolExecutor(4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, port
    server.stop(0)


@pytest.fixture(scope="module", name="traced")
def traced_cluster(
    collector: tuple[Collector, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedCluster]:
    flags = ("--tracing-otlp-endpoint", f"http://127.0.0.1:{collector[1]}", "--log-level", "warning")
    directory: Path = tmp_path_factory.mktemp("traced")
    with served_cluster(directory, *flags) as cluster:
        yield cluster


def test_a_request_is_one_trace_across_all_processes(collector: tuple[Collector, int], traced: ServedCluster) -> None:
    body = {"prompt": WORDS * 20, "max_tokens": 4, "temperature": 0}
    with traced.client() as client:
        response = client.post("/v1/completions", json=body, headers={"traceparent": CLIENTS})
    assert response.status_code == 200, response.text
    wanted = {
        ("whalepod-router", "request completions"): None,
        ("whalepod-router", "queue"): ("whalepod-router", "request completions"),
        ("whalepod-router", "tokenize"): ("whalepod-router", "request completions"),
        ("whalepod-router", "lookup"): ("whalepod-router", "request completions"),
        ("whalepod-router", "attempt"): ("whalepod-router", "request completions"),
        ("whalepod-prefill", "prefill"): ("whalepod-router", "attempt"),
        ("whalepod-prefill", "kv store"): ("whalepod-prefill", "prefill"),
        ("whalepod-decode", "decode"): ("whalepod-router", "attempt"),
        ("whalepod-decode", "kv restore"): ("whalepod-decode", "decode"),
    }
    told = collector[0]
    deadline = Deadline.after(20)
    with told.changed:
        while set(wanted) - set(told.spans) and not deadline.expired:
            told.changed.wait(deadline.remaining_s())
        spans: Mapping[tuple[str, str], Any] = dict(told.spans)
    assert set(wanted) - set(spans) == set()
    for key, parent in wanted.items():
        expected = CLIENTS.split("-")[2] if parent is None else spans[parent].span_id.hex()
        assert spans[key].parent_span_id.hex() == expected, key
    request = {item.key: item.value for item in spans["whalepod-router", "request completions"].attributes}
    assert request["whalepod.completion_tokens"].int_value == 4
    assert request["whalepod.outcome"].string_value == "ok"
    assert "whale swam" not in told.text
