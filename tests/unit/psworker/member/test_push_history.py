"""What a worker writes down, and that nothing is written when nobody wants it."""

import json
from pathlib import Path
from typing import Any

import pytest

from pswire.membership import Outcome, WorkerKey
from psworker.errors import ConfigurationError
from psworker.member.push_history import PushHistory
from psworker.transport.values import PushHeader, PushReply

WORKER = WorkerKey("w/0", 2)
HEADER = PushHeader(
    job_id="job",
    optimizer="optimizer",
    worker=WORKER,
    generation=3,
    sequence=5,
    sequence_unacknowledged_min=5,
    clock=7,
)


def reply(outcome: Outcome) -> PushReply:
    return PushReply(
        outcome=outcome,
        shard_incarnation=1,
        generation=3,
        version=12,
        frontier=6,
        clock=7,
    )


def lines(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(folder: Path) -> PushHistory:
    return PushHistory.open(str(folder), "job", WORKER)


def test_a_push_and_its_answers(tmp_path: Path) -> None:
    history = opened(tmp_path)
    with history.push(HEADER) as answered:
        told = [reply(Outcome.APPLIED), reply(Outcome.DUPLICATE)]
        assert answered(told) is told
    history.close()

    begin, invoke, ok = lines(tmp_path)
    assert (begin["role"], begin["worker"]) == ("worker", ["w/0", 2])
    assert invoke["type"] == "invoke"
    assert (invoke["push"], invoke["clock"]) == (["w/0", 2, 5], 7)
    assert (ok["type"], ok["outcome"]) == ("ok", "applied")
    assert [each["shard"] for each in ok["replies"]] == [0, 1]
    assert ok["replies"][0]["frontier"] == 6


def test_a_push_that_all_shards_had_already_is_a_duplicate(tmp_path: Path) -> None:
    history = opened(tmp_path)
    with history.push(HEADER) as answered:
        answered([reply(Outcome.DUPLICATE)])
    assert lines(tmp_path)[-1]["outcome"] == "duplicate"


def test_a_push_without_answers_is_unknown(tmp_path: Path) -> None:
    history = opened(tmp_path)
    with pytest.raises(TimeoutError), history.push(HEADER):
        raise TimeoutError("nobody came")
    unknown = lines(tmp_path)[-1]
    assert unknown["type"] == "unknown"
    assert unknown["error"] == "TimeoutError: nobody came"


@pytest.mark.parametrize(("was_done", "kind"), [(True, "ok"), (False, "fail")])
def test_what_became_of_an_earlier_start(
    tmp_path: Path, kind: str, *, was_done: bool
) -> None:
    history = opened(tmp_path)
    history.push_settled(WorkerKey("w/0", 1), 9, was_done=was_done)
    settled = lines(tmp_path)[-1]
    assert (settled["type"], settled["push"]) == (kind, ["w/0", 1, 9])


def test_pulls_and_commits(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.pulled(WORKER, 7, [reply(Outcome.APPLIED)])
    history.committed(WORKER, 1, 8)
    pulled, committed = lines(tmp_path)[-2:]
    assert (pulled["op"], pulled["clock"]) == ("pull", 7)
    assert (committed["op"], committed["shard"], committed["clock"]) == ("commit", 1, 8)


def test_without_a_path_nothing_is_written() -> None:
    history = PushHistory.open("", "job", WORKER)
    with history.push(HEADER) as answered:
        assert answered([]) == []
    history.push_settled(WORKER, 1, was_done=True)
    history.pulled(WORKER, 7, [])
    history.committed(WORKER, 1, 8)
    history.close()


def test_a_path_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="no history can be written"):
        PushHistory.open(f"{tmp_path}/file/h.jsonl", "job", WORKER)
