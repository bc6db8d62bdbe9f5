"""Splits that a job records: one for all workers and every later evaluation."""

import json
from pathlib import Path

import grpc
import pytest

import psworker
from psctl.status import read_document, status_text
from pswire.addresses import parse_address
from pswire.reasons import ErrorReason
from pswire.v1 import coordinator_service_pb2, membership_pb2
from psworker.data import split
from tests.integration.forged_calls import TIMEOUT_S, asked, refusal_of
from tests.integration.job import Job, connect

LABELS = [number % 4 for number in range(80)]


def drawn(seed: int = 0) -> psworker.data.Split:
    return split(80, by="class", labels=LABELS, seed=seed)


def test_all_workers_and_an_evaluation_have_the_split_of_the_first(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job:
        with connect(job, "w0") as first, connect(job, "w1") as second:
            made = first.record_split("folds \x1b[1m", drawn())
            assert second.record_split("folds \x1b[1m", drawn()).digest == made.digest
            with pytest.raises(psworker.SplitError) as caught:
                second.record_split("folds \x1b[1m", drawn(seed=1))
            assert str(caught.value) == (
                "split 'folds \\x1b[1m' differs from the one that worker 'w0' has "
                "recorded: seed is 1, not 0; give every worker the same data, "
                "arguments and release of the library, or record this split under "
                "another name"
            )
        job.stop_coordinator()
        job.start_coordinator()
        with psworker.SnapshotReader(job.address) as reader:
            again = reader.split("folds \x1b[1m", 80, labels=LABELS)
            assert again.digest == made.digest
            assert again.test.tolist() == made.test.tolist()
            with pytest.raises(psworker.SplitError, match="labels is"):
                reader.split("folds \x1b[1m", 80, labels=LABELS[::-1])
            with pytest.raises(
                psworker.SplitError, match=r"no split 'x'; it has 'folds .*: let a wor"
            ):
                reader.split("x", 80)
            with pytest.raises(psworker.ConfigurationError, match="no name of a split"):
                reader.split("", 80)
        address = parse_address(job.address)
        document = read_document(address)
        (told,) = json.loads(json.dumps(document["splits"]))
        assert told == {
            "name": "folds \x1b[1m",
            "digest": made.digest,
            "item_count": 80,
            "recorder": "w0",
        }
        text = status_text(document)
        assert f"80 items, digest {made.digest[:12]}" in text
        assert "\x1b" not in text


def test_a_split_of_another_kind_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=1) as job, connect(job, "w0") as ps:
        with pytest.raises(psworker.ConfigurationError, match="a list is no split: "):
            ps.record_split("x", [1, 2])  # type: ignore[arg-type]
        with pytest.raises(psworker.ConfigurationError, match="no name of a split"):
            ps.record_split("", drawn())
        with pytest.raises(psworker.ConfigurationError, match="at most 1024"):
            ps.record_split("x" * 1025, drawn())


def test_a_worker_that_has_left_records_nothing(tmp_path: Path) -> None:
    with Job(tmp_path, shard_count=1, sockets=True) as job:
        with connect(job, "w0"):
            pass
        request = coordinator_service_pb2.RecordSplitRequest(
            job_id=job.ask(lambda: job.coordinator.core.settings.job_id),
            worker=membership_pb2.WorkerIdentity(worker_id="w0", incarnation=1),
            split=coordinator_service_pb2.SplitRecord(name="x", digest="0" * 64),
        )
        with grpc.insecure_channel(job.address) as channel:
            call = asked(channel, "RecordSplit")
            message = request.SerializeToString()
            _, text, reason = refusal_of(call(message, timeout=TIMEOUT_S))
        assert reason is ErrorReason.WORKER_INCARNATION_STALE, text
        assert job.ask(job.coordinator.data.splits.all) == ()


def test_a_script_alone_has_splits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PS_COORDINATOR", raising=False)
    with psworker.connect() as ps:
        assert ps.record_split("x", drawn()).digest == drawn().digest
        with pytest.raises(psworker.SplitError, match="this script has recorded: seed"):
            ps.record_split("x", drawn(seed=1))
    with pytest.raises(psworker.ClosedError):
        ps.record_split("x", drawn())
