"""The tables of metrics: what they name and read, and the page that lists them."""

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request

from psserver.edge.limits import DEFAULT_LIMITS
from psserver.edge.metrics import (
    JOB,
    PROCESS,
    SHARD,
    TABLES,
    JobReadings,
    Process,
    ShardReadings,
    metrics_route,
)
from psserver.edge.open_calls import OpenCalls
from pswire.membership import Mode, Outcome, WorkerState
from pswire.metric_rows import Kind, Metric, Rows
from pswire.reasons import ErrorReason
from pswire.v1 import coordinator_service_pb2 as messages
from pswire.v1 import membership_pb2, push_pb2
from psworker.metrics_port import WORKER

PAGE: Final = Path(__file__).resolve().parents[4] / "docs" / "metrics.md"
ALL: Final[list[Metric[Any]]] = [
    *(metric for table in TABLES.values() for metric in table),
    *WORKER,
]


def samples(*rows: Rows[Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scrape finds, by name and labels."""
    registry = CollectorRegistry()
    for each in rows:
        registry.register(each)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def job(**changes: Any) -> JobReadings:  # noqa: ANN401, fields of the readings
    values: dict[str, Any] = {
        "status": messages.GetStatusResponse(mode=membership_pb2.Mode.ValueType(1)),
        "causes": ("training", "straggler"),
        "sample_count": 0,
        "version": 0,
        "checkpoint_count": 0,
        "checkpoint_failure_count": 0,
        "checkpoint_ms": None,
        "is_state_written": True,
    }
    return JobReadings(**{**values, **changes})


def test_the_page_lists_the_same_metrics() -> None:
    listed = [
        tuple(cell.strip() for cell in line.strip("|").split(" | "))
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `ps_")
    ]
    assert listed == [
        (
            f"`{metric.name}`",
            metric.kind.value,
            ", ".join(f"`{label}`" for label in metric.labels) or "-",
            metric.help,
        )
        for metric in ALL
    ]


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_are_as_prometheus_wants_them(metric: Metric[Any]) -> None:
    assert re.fullmatch(r"ps(_[a-z]+)+", metric.name)
    assert not re.search(r"_(ms|mib|kib|count)$", metric.name), "base units"
    assert metric.help.endswith(".")
    assert "worker" not in metric.labels or metric.kind is Kind.GAUGE


def test_no_name_stands_twice() -> None:
    assert not [name for name, n in Counter(m.name for m in ALL).items() if n > 1]


def test_a_process_says_whom_it_has_refused() -> None:
    process = Process("shard", OpenCalls(DEFAULT_LIMITS), None)
    process.calls.refused[ErrorReason.BUSY] += 2
    process.calls.ended["surplus"] += 3

    found = samples(Rows(PROCESS, lambda: process))

    refused = {
        dict(labels)["reason"]: value
        for (name, labels), value in found.items()
        if name == "ps_calls_refused_total"
    }
    assert refused == {
        "busy": 2,
        "limit_exceeded": 0,
        "unauthenticated": 0,
        "permission_denied": 0,
    }
    assert found["ps_connections_ended_total", (("reason", "surplus"),)] == 3
    assert ("ps_ready", ()) not in found, "there is no admin port"


@pytest.mark.parametrize(
    ("accepts", "media_type"),
    [
        ("", "text/plain"),
        ("text/plain;version=0.0.4", "text/plain"),
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text"),
        ("application/openmetrics-text; version=a.b", "application/openmetrics-text"),
        ("text/plain;version=a.b;escaping=nothing", "text/plain"),
    ],
)
async def test_all_who_scrape_within_a_second_share_a_reading(
    accepts: str, media_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psserver.edge.shared_answer.KEPT_S", 3600.0)
    reading_count = 0

    def read() -> JobReadings:
        nonlocal reading_count
        reading_count += 1
        return job()

    route = metrics_route(Rows(JOB, read))
    headers = [(b"accept", accepts.encode())]
    request = Request({"type": "http", "headers": headers})
    answers = [await route.endpoint(request) for _ in range(3)]
    assert reading_count == 1
    assert {each.body for each in answers} == {answers[0].body}
    assert b"ps_job_phase" in answers[0].body
    assert answers[0].headers["content-type"].startswith(media_type)
    assert answers[0].body.endswith(b"# EOF\n") == ("openmetrics" in media_type)


def test_a_job_before_its_start_has_no_made_up_numbers() -> None:
    found = samples(Rows(JOB, job))
    assert found["ps_job_mode", (("mode", Mode.BSP.label),)] == 1
    assert found["ps_job_mode", (("mode", Mode.ASP.label),)] == 0
    assert not any(name.startswith(("ps_worker_", "ps_shard_")) for name, _ in found)
    for absent in ("ps_job_steps_per_second", "ps_checkpoint_age_seconds"):
        assert (absent, ()) not in found


def test_a_job_that_trains_is_told_by_worker_shard_and_encoding() -> None:
    def worker(name: str, rank: int, clock: int) -> messages.WorkerStatus:
        return messages.WorkerStatus(
            worker=membership_pb2.WorkerIdentity(worker_id=name),
            rank=rank,
            state=WorkerState.MEMBER,
            clock=clock,
            silent_ms=1500,
            work=messages.WorkStatus(
                step_count=clock,
                compute_ms=20.0,
                traffic=messages.Traffic(
                    sent_bytes=7,
                    encodings=[
                        messages.EncodedBytes(encoding="int8", sent_bytes=clock)
                    ],
                ),
            ),
        )

    status = messages.GetStatusResponse(
        mode=membership_pb2.Mode.ValueType(2),
        staleness_bound=3,
        workers=[worker("a", 0, 4), worker("b", 1, 9), worker("gone", -1, 2)],
        shards=[
            messages.ShardStatus(
                state="ready",
                frontier=4,
                waiting=push_pb2.Waiting(
                    waited_ms=100, awaited=[push_pb2.Awaited(name="a")]
                ),
            )
        ],
        diagnosis=messages.Diagnosis(cause="straggler"),
        metrics=[messages.Metric(name="loss", value=math.nan)],
        steps_per_s=2.5,
    )
    status.checkpoints.newest.age_ms = 2_000
    status.checkpoints.failure = "the disk is full"

    found = samples(Rows(JOB, lambda: job(status=status, checkpoint_ms=250)))

    def of(metric: str, **labels: str) -> float:
        return found[metric, tuple(sorted(labels.items()))]

    assert of("ps_job_clock") == 4
    assert of("ps_job_steps_per_second") == 2.5
    assert of("ps_job_cause", cause="straggler") == 1
    assert of("ps_job_cause", cause="training") == 0
    assert of("ps_job_encoded_bytes", direction="to_shards", encoding="int8") == 13
    assert math.isnan(of("ps_job_logged", name="loss"))
    assert of("ps_worker_lag_clocks", worker="a") == 5
    assert of("ps_worker_awaited", worker="a") == 1
    assert of("ps_worker_awaited", worker="b") == 0
    assert of("ps_worker_lease_age_seconds", worker="b") == 1.5
    assert of("ps_worker_step_part_seconds", worker="a", part="compute") == 0.02
    assert of("ps_shard_up", shard="0") == 1
    assert of("ps_checkpoint_age_seconds") == 2
    assert of("ps_checkpoint_duration_seconds") == 0.25
    assert of("ps_checkpoint_failing") == 1
    named = {dict(labels).get("worker") for _, labels in found}
    assert named == {None, "a", "b"}, "who is no member has no series"


def test_staleness_is_a_histogram() -> None:
    counts = [0] * 64
    counts[0], counts[3], counts[63] = 5, 2, 1
    report = messages.ReportProgressRequest(staleness_counts=counts)
    readings = ShardReadings(report=report, outcomes={}, waits_for="")

    found = samples(Rows(SHARD, lambda: readings))

    def below(bound: str) -> float:
        return found["ps_shard_staleness_bucket", (("le", bound),)]

    assert [below(each) for each in ("0.0", "2.0", "3.0", "62.0", "+Inf")] == [
        *(5, 5, 7, 7, 8)
    ]
    assert found["ps_shard_staleness_count", ()] == 8
    assert found["ps_shard_staleness_sum", ()] == 2 * 3 + 63


def test_a_shard_says_what_it_waits_for() -> None:
    report = messages.ReportProgressRequest(
        waiting=push_pb2.Waiting(
            waited_ms=3_000, awaited=[push_pb2.Awaited(name="a", step_ms=2_000)]
        )
    )
    readings = ShardReadings(
        report=report, outcomes={Outcome.SKIPPED: 2}, waits_for="members"
    )

    found = samples(Rows(SHARD, lambda: readings))

    assert found["ps_shard_waiting_seconds", (("reason", "members"),)] == 3
    assert found["ps_shard_waiting_seconds", (("reason", "coordinator"),)] == 0
    assert found["ps_shard_awaited_seconds", (("worker", "a"),)] == 2
    assert found["ps_shard_pushes_total", (("outcome", "skipped"),)] == 2


def test_a_shard_without_a_place_has_no_rows() -> None:
    assert samples(Rows(SHARD, lambda: None)) == {}
