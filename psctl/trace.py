"""`psctl trace`: what each process of a running job does in its next steps.

The file has the trace-event format, as Perfetto and chrome://tracing open it. Source:
"Trace Event Format", the Chromium project: complete events (`ph` `X`), microseconds.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from psctl.failures import CommandError
from psctl.folders import placed, writing
from psctl.options import say
from psctl.status import ask
from pswire.addresses import Address
from pswire.exit_codes import ExitCode
from pswire.span_log import Span
from psworker.transport.status_client import RecordedProcess, record_trace

SCHEMA_VERSION: Final = 1

_SCRIPT: Final = "script"
"""The lane of a worker's spans, which has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """What was recorded, and where it is."""

    path: Path
    processes: Sequence[RecordedProcess]

    def to_json(self) -> dict[str, object]:
        return {
            "schema_version": SCHEMA_VERSION,
            "path": str(self.path),
            "processes": [
                {
                    "name": each.name,
                    "span_count": len(each.spans),
                    "complete": each.is_complete,
                    "clock_error_ms": None
                    if each.clock_error_us is None
                    else each.clock_error_us / 1000,
                    "left_out_count": each.left_out_count,
                }
                for each in self.processes
            ],
        }

    @property
    def text(self) -> str:
        errors = [
            each.clock_error_us / 1000
            for each in self.processes
            if each.clock_error_us is not None
        ]
        lines = [
            f"{self.path}: {sum(len(each.spans) for each in self.processes)} spans of "
            f"{len(self.processes)} processes; open it in https://ui.perfetto.dev or "
            "chrome://tracing",
            f"times of different processes agree to {max(errors, default=0):.1f} ms",
        ]
        unfinished = [each.name for each in self.processes if not each.is_complete]
        if unfinished:
            lines.append(
                f"not all steps in time: {', '.join(unfinished)}; they step slowly or "
                "wait: give a longer --timeout, or fewer --steps"
            )
        return "\n".join(lines)


def save_trace(
    coordinator: Address, out: Path, *, step_count: int, timeout_s: float
) -> TraceReport:
    """Records a trace and writes it.

    Raises:
        CommandError: Nothing was recorded, or the file can't be written.
    """
    path = placed(out)
    say(f"recording {step_count} steps of all workers and shards")
    question = record_trace(str(coordinator), step_count, timeout_s=timeout_s)
    processes = ask(coordinator, question, timeout_s=timeout_s)
    if not any(each.spans for each in processes):
        raise CommandError(
            f"no step was made within {timeout_s:g} s: `psctl status` says what the "
            "job waits for",
            ExitCode.TRY_AGAIN,
        )
    with writing(out):
        path.write_text(json.dumps(trace_document(processes)))
    return TraceReport(path=path, processes=processes)


def send_trace(report: TraceReport, collector: Address) -> None:
    """Sends what was recorded to a collector of OpenTelemetry.

    Raises:
        CommandError: The extra is not installed, or the collector has not taken it.
    """
    try:
        from psctl.otlp import send
    except ImportError as error:
        raise CommandError(
            f"--otlp needs OpenTelemetry ({error}): pip install 'paramserver[otel]'",
            ExitCode.BAD_CONFIGURATION,
        ) from error
    say(f"{send(report.processes, collector)} spans sent to {collector}")


def trace_document(processes: Sequence[RecordedProcess]) -> dict[str, Any]:
    """A trace in the trace-event format, from its first span on."""
    start_us = min(span.begin_us for each in processes for span in each.spans)
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes, start=1):
        events.append(_named("process_name", number, 0, process.name))
        lanes = sorted({span.lane or _SCRIPT for span in process.spans})
        for lane_number, lane in enumerate(lanes, start=1):
            events.append(_named("thread_name", number, lane_number, lane))
        waited_for = last_pushes(process.spans)
        events += [
            {
                "ph": "X",
                "name": span.kind,
                "pid": number,
                "tid": 1 + lanes.index(span.lane or _SCRIPT),
                "ts": span.begin_us - start_us,
                "dur": span.end_us - span.begin_us,
                "args": _details(span, waited_for),
            }
            for span in process.spans
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock_error_us": {each.name: each.clock_error_us for each in processes}
        },
    }


def last_pushes(spans: Iterable[Span]) -> dict[int, str]:
    """By step, the worker whose push a shard had last: all others waited for it."""
    ends: dict[int, dict[str, int]] = defaultdict(dict)
    for span in spans:
        if span.kind == "receive":
            ends[span.step][span.lane] = span.end_us
    return {
        step: max(of_worker, key=of_worker.__getitem__)
        for step, of_worker in ends.items()
        if len(of_worker) > 1
    }


def _details(span: Span, waited_for: dict[int, str]) -> dict[str, object]:
    details: dict[str, object] = {"step": span.step}
    last = waited_for.get(span.step)
    if span.kind == "hold" and last not in (None, span.lane):
        details["waited_for"] = last
    return details


def _named(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": kind,
        "pid": process,
        "tid": lane,
        "args": {"name": name},
    }
