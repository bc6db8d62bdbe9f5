"""A trace as OpenTelemetry has it, sent to a collector; the extra `otel`.

Each step is a trace of its own: a span for the step, and below it what all workers and
shards have done in it. Ids follow from the job's times, so that none need be agreed on.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from psctl.failures import CommandError
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from psworker.transport.status_client import RecordedProcess

TIMEOUT_S = 10.0
"""Longest time for a collector to take a trace."""


def send(processes: Sequence[RecordedProcess], collector: Address) -> int:
    """Sends a trace by gRPC, without TLS; how many spans.

    Raises:
        CommandError: The collector has not taken it.
    """
    exporter = OTLPSpanExporter(
        endpoint=f"http://{collector}", insecure=True, timeout=TIMEOUT_S
    )
    spans = spans_of(processes)
    try:
        result = exporter.export(spans)
    finally:
        exporter.shutdown()
    if result is not SpanExportResult.SUCCESS:
        raise CommandError(
            f"the collector at {collector} has not taken the trace: is OTLP by gRPC "
            "on at that port?",
            ExitCode.PEER_UNAVAILABLE,
        )
    return len(spans)


def spans_of(processes: Sequence[RecordedProcess]) -> list[ReadableSpan]:
    """All spans, with one above them for each step."""
    start_us = min(span.begin_us for each in processes for span in each.spans)
    times: dict[int, list[int]] = defaultdict(list)
    found = []
    for process in processes:
        resource = Resource.create(
            {"service.name": "paramserver", "service.instance.id": process.name}
        )
        for number, span in enumerate(process.spans):
            times[span.step] += (span.begin_us, span.end_us)
            found.append(
                ReadableSpan(
                    name=span.kind,
                    context=_context(start_us, span.step, f"{process.name} {number}"),
                    parent=_context(start_us, span.step, ""),
                    resource=resource,
                    attributes={"ps.step": span.step, "ps.lane": span.lane},
                    start_time=span.begin_us * 1000,
                    end_time=span.end_us * 1000,
                )
            )
    job = Resource.create({"service.name": "paramserver"})
    return [
        *(
            ReadableSpan(
                name="step",
                context=_context(start_us, step, ""),
                resource=job,
                attributes={"ps.step": step},
                start_time=min(of_step) * 1000,
                end_time=max(of_step) * 1000,
            )
            for step, of_step in times.items()
        ),
        *found,
    ]


def _context(start_us: int, step: int, name: str) -> SpanContext:
    def number(text: str, size: int) -> int:
        digest = hashlib.blake2b(text.encode(), digest_size=size).digest()
        return int.from_bytes(digest) or 1

    return SpanContext(
        trace_id=number(f"{start_us} {step}", 16),
        span_id=number(f"{start_us} {step} {name}", 8),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
