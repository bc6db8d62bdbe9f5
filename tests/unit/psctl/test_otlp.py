"""Traces as a collector of OpenTelemetry gets them."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pswire.addresses import Address
from pswire.span_log import Span
from psworker.transport.status_client import RecordedProcess

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")


def process(name: str, *spans: Span) -> RecordedProcess:
    return RecordedProcess(
        name=name, spans=spans, clock_error_us=1, is_complete=True, left_out_count=0
    )


PROCESSES = [
    process("worker a", Span("compute", 100, 200, 4), Span("send", 200, 250, 4)),
    process(
        "shard 0", Span("apply", 240, 300, 4, "t"), Span("apply", 400, 500, 5, "t")
    ),
]


def test_a_collector_gets_each_step_as_a_trace() -> None:
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

    from psctl.otlp import send

    taken: list[Any] = []

    def export(request: Any, _: Any) -> Any:  # noqa: ANN401, a collector's
        taken.append(request)
        return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "opentelemetry.proto.collector.trace.v1.TraceService",
                {
                    "Export": grpc.unary_unary_rpc_method_handler(
                        export,
                        messages.ExportTraceServiceRequest.FromString,
                        messages.ExportTraceServiceResponse.SerializeToString,
                    )
                },
            ),
        )
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert send(PROCESSES, Address("127.0.0.1", port)) == 6
    finally:
        server.stop(None).wait()

    spans = [
        span
        for request in taken
        for of_resource in request.resource_spans
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]
    steps = {span.span_id: span for span in spans if span.name == "step"}
    assert len(steps) == 2
    for span in spans:
        if span.name == "step":
            continue
        step = steps[span.parent_span_id]
        assert step.trace_id == span.trace_id
        assert step.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= step.end_time_unix_nano
    first = min(steps.values(), key=lambda step: step.start_time_unix_nano)
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (100_000, 300_000)
