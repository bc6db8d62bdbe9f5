"""Histories that do not fit, are cut short, still grow, or are none."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from psctl import check_history as check_history_module
from psctl.check_history import STILL_WRITTEN, check_history
from psctl.failures import CommandError
from psctl.history.findings import Findings
from psctl.history.lines import Start, read_starts
from psctl.tables import count_text
from pswire.exit_codes import ExitCode
from tests.doubles.made_histories import (
    SHARDS,
    Histories,
    applied_twice,
    broken,
    good,
    push,
)


def other_job(run: Histories) -> None:
    run.files["shard-1"][0]["job"] = "k"


def missing_shard(run: Histories) -> None:
    del run.files["shard-1"]


def other_record(run: Histories) -> None:
    run.find("shard-1", "record", generation=1)["members"][0][2] = 7


def unknown_format(run: Histories) -> None:
    run.files["shard-1"][0]["format"] = 2


def senseless_line(run: Histories) -> None:
    run.add("shard-1", "done", push="a")


def endless_number(run: Histories) -> None:
    run.add("shard-1", "trailer", push=push("a", 9), chunks=[float("inf")], weight=1)


def too_many_shards(run: Histories) -> None:
    run.files["coordinator"][0]["shard_count"] = 10**12


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (other_job, "histories of 2 jobs: j, k"),
        (missing_shard, "the history of shard 1 is missing"),
        (other_record, "generation 1 has other members than at coordinator.jsonl:2"),
        (unknown_format, "format 2 is not 1"),
        (senseless_line, "this line is not understood"),
        (endless_number, "this line is not understood"),
        (too_many_shards, "no job has 1000000000000 shards"),
    ],
)
def test_histories_that_do_not_fit_are_told(
    tmp_path: Path, breaks: Callable[[Histories], None], said: str
) -> None:
    run = good()
    breaks(run)
    assert said in broken(run.check(tmp_path))["files"]


def test_a_line_cut_short_by_the_end_of_a_process_is_passed_over(
    tmp_path: Path,
) -> None:
    run = good()
    assert broken(run.check(tmp_path)) == {}
    shard = tmp_path / "shard-0.jsonl"
    whole = shard.read_text()
    shard.write_text(whole + '{"type":"app')
    assert broken(check_history([tmp_path])) == {}

    shard.write_text(whole + '{"type":"app\n{"type":"fence"}\n')
    assert "not one of a history" in broken(check_history([tmp_path]))["files"]


def test_a_coordinator_that_started_again_has_two_starts(tmp_path: Path) -> None:
    run = good()
    begin = run.files["coordinator"][0]
    run.files["coordinator"].insert(2, dict(begin))
    assert broken(run.check(tmp_path)) == {}


def test_a_file_that_is_no_history_is_told(tmp_path: Path) -> None:
    run = good()
    run.check(tmp_path)
    (tmp_path / "notes.jsonl").write_text("hello\n")
    assert "no history" in broken(check_history([tmp_path]))["files"]
    (tmp_path / "notes.jsonl").write_text("[" * 100_000 + "\n")
    assert "no history" in broken(check_history([tmp_path]))["files"]


def test_nothing_to_check_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--history FOLDER/"):
        check_history([tmp_path])
    with pytest.raises(CommandError, match="No such file"):
        check_history([tmp_path / "missing.jsonl"])
    with pytest.raises(CommandError, match="no file on a disk"):
        check_history([Path("/dev/zero")])


def test_files_without_a_shards_history_are_an_error(tmp_path: Path) -> None:
    run = good()
    for shard in SHARDS:
        del run.files[shard]
    with pytest.raises(CommandError, match="no shard's history among these") as told:
        run.check(tmp_path)
    assert told.value.exit_code == ExitCode.USAGE
    assert "coordinator.jsonl, worker-a-1.jsonl" in str(told.value)


def test_a_break_in_histories_that_still_grow_says_to_check_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = good()
    applied_twice(run)
    assert run.check(tmp_path).exit_code == ExitCode.ERROR

    def read_while_one_grows(files: list[Path], findings: Findings) -> list[Start]:
        starts = read_starts(files, findings)
        with (tmp_path / "shard-1.jsonl").open("a") as shard:
            shard.write('{"type": "opened"}\n')
        (tmp_path / "worker-c-1.jsonl").touch()
        return starts

    monkeypatch.setattr(check_history_module, "read_starts", read_while_one_grows)
    report = check_history([tmp_path])
    assert report.exit_code == ExitCode.TRY_AGAIN
    assert report.still_written == ("shard-1.jsonl", "worker-c-1.jsonl")
    assert STILL_WRITTEN in report.to_text()
    assert report.to_json()["still_written"] == ["shard-1.jsonl", "worker-c-1.jsonl"]


def test_workers_are_counted_by_id_and_numbers_agree_with_their_nouns(
    tmp_path: Path,
) -> None:
    run = good()
    run.begin("worker-a-2", "worker", worker=["a", 2])
    text = run.check(tmp_path).to_text()
    assert "6 files, 2 workers (3 starts), 2 shards, 2 generations, 0 evictions" in text
    assert count_text(1, "file") == "1 file"
    assert count_text(1, "torn push", "torn pushes") == "1 torn push"
    assert count_text(0, "torn push", "torn pushes") == "0 torn pushes"


def test_the_json_has_every_promise_and_break(tmp_path: Path) -> None:
    run = good()
    applied_twice(run)
    told = run.check(tmp_path).to_json()
    assert told["schema_version"] == 1
    promises = told["promises"]
    assert isinstance(promises, dict)
    assert list(promises) == ["files", "G1", "G3", "G4", "G6", "G40"]
    assert "a second time" in promises["G1"]["breaks"][0]["text"]
    json.dumps(told)
