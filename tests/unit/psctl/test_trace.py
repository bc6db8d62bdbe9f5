"""The file that `psctl trace` writes."""

from pathlib import Path

from psctl.trace import TraceReport, last_pushes, trace_document
from pswire.span_log import Span
from psworker.transport.status_client import RecordedProcess


def process(name: str, *spans: Span, is_complete: bool = True) -> RecordedProcess:
    return RecordedProcess(
        name=name,
        spans=spans,
        clock_error_us=1_500,
        is_complete=is_complete,
        left_out_count=0,
    )


SHARD = process(
    "shard 0",
    Span("receive", 1_000, 1_100, 4, "a"),
    Span("receive", 1_000, 1_900, 4, "b"),
    Span("hold", 1_100, 2_000, 4, "a"),
    Span("hold", 1_900, 2_000, 4, "b"),
    Span("apply", 1_900, 1_990, 4, "apply-0"),
)
WORKER = process("worker a", Span("compute", 500, 1_000, 4), is_complete=False)


def test_who_pushed_last_is_whom_the_others_waited_for() -> None:
    assert last_pushes(SHARD.spans) == {4: "b"}
    assert last_pushes(WORKER.spans) == {}
    events = trace_document([SHARD])["traceEvents"]
    holds = {event["tid"]: event["args"] for event in events if event["name"] == "hold"}
    assert sorted(holds.values(), key=len) == [
        {"step": 4},
        {"step": 4, "waited_for": "b"},
    ]


def test_times_begin_with_the_first_span_of_all() -> None:
    document = trace_document([SHARD, WORKER])
    events = document["traceEvents"]
    (compute,) = (event for event in events if event["name"] == "compute")
    assert (compute["ph"], compute["ts"], compute["dur"]) == ("X", 0, 500)
    assert document["otherData"]["clock_error_us"]["shard 0"] == 1_500


def test_each_process_and_lane_has_a_name_of_its_own() -> None:
    events = trace_document([SHARD, WORKER])["traceEvents"]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M"
    }
    assert named == {
        (1, 0): "shard 0",
        (1, 1): "a",
        (1, 2): "apply-0",
        (1, 3): "b",
        (2, 0): "worker a",
        (2, 1): "script",
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} <= set(named)


def test_the_report_says_how_exact_it_is_and_who_is_missing() -> None:
    report = TraceReport(path=Path("t.json"), processes=[SHARD, WORKER])
    assert "6 spans of 2 processes" in report.text
    assert "agree to 1.5 ms" in report.text
    assert "not all steps in time: worker a" in report.text
    assert report.to_json()["processes"][0]["complete"]  # type: ignore[index]
