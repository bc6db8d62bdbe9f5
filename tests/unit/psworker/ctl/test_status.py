import json
from dataclasses import replace

from pswire.addresses import Address
from psworker.ctl.status import status_json, status_text
from psworker.transport.status_client import JobStatus, ShardState, WorkerState
from psworker.transport.values import JobSettings, Mode

COORDINATOR = Address("127.0.0.1", 7070)


def _worker(worker_id: str, **changes: object) -> WorkerState:
    worker = WorkerState(
        worker_id=worker_id,
        incarnation=1,
        rank=0,
        state="member",
        clock=12,
        silent_ms=0,
        address="127.0.0.1:5000",
    )
    return replace(worker, **changes)  # type: ignore[arg-type]


STATUS = JobStatus(
    settings=JobSettings(
        job_id="job-1",
        shard_count=2,
        mode=Mode.BSP,
        staleness_bound=0,
        workers_min=2,
        lease_ttl_ms=10_000,
    ),
    phase="running",
    generation=3,
    workers=(_worker("w0"), _worker("w1", rank=1, clock=9, silent_ms=2300)),
    shards=(
        ShardState(
            shard_index=0,
            incarnation=1,
            state="ready",
            address="127.0.0.1:6000",
            silent_ms=100,
            parameter_bytes=3 << 20,
            optimizer_bytes=0,
            clock=12,
            version=21,
        ),
        ShardState(
            shard_index=1,
            incarnation=0,
            state="missing",
            address="",
            silent_ms=-1,
            parameter_bytes=0,
            optimizer_bytes=0,
            clock=0,
            version=0,
        ),
    ),
    waiting_for="w1 (clock 9, silent for 2 s)",
    snapshot_version=-1,
    tensor_count=4,
    parameter_bytes=3 << 20,
    failure="",
)


def test_the_json_says_null_where_nothing_is_known() -> None:
    read = json.loads(json.dumps(status_json(COORDINATOR, STATUS)))
    assert read["schema_version"] == 1
    assert read["coordinator"] == "127.0.0.1:7070"
    assert read["snapshot_version"] is None
    assert read["failure"] is None
    assert read["shards"][1]["silent_ms"] is None
    assert read["shards"][1]["address"] is None
    assert [worker["lag"] for worker in read["workers"]] == [0, 3]
    assert read["job"]["mode"] == "bsp"


def test_the_text_tells_whom_the_job_waits_for_and_who_lags() -> None:
    text = status_text(STATUS)
    assert "waits for   w1 (clock 9, silent for 2 s)" in text
    lines = text.splitlines()
    (laggard,) = [line for line in lines if line.startswith("w1 ")]
    assert laggard.split()[3:5] == ["9", "3"]
    assert "2.3 s" in laggard
    assert any(line.strip().startswith("1  missing") for line in lines)
    assert "never heard" in text
    assert "none yet" in text


def test_names_of_workers_cant_steer_the_terminal() -> None:
    hostile = _worker("\x1b[2J\x1b]0;owned\x07[bold]w")
    text = status_text(replace(STATUS, workers=(hostile,)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]w" in text


def test_a_job_without_workers_and_a_failed_one_say_so() -> None:
    assert "no workers" in status_text(replace(STATUS, workers=()))
    failed = replace(STATUS, phase="failed", failure="shard 1 is lost")
    assert "failure     shard 1 is lost" in status_text(failed)


def test_the_bound_is_part_of_the_mode() -> None:
    settings = replace(STATUS.settings, mode=Mode.SSP, staleness_bound=3)
    assert "ssp (staleness 3)" in status_text(replace(STATUS, settings=settings))
