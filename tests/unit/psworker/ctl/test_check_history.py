"""The check of histories: a good one passes, one broken for each promise does not."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pswire.exit_codes import ExitCode
from psworker.ctl import check_history as check_history_module
from psworker.ctl.check_history import STILL_WRITTEN, HistoryReport, check_history
from psworker.ctl.failures import CommandError
from psworker.ctl.history.findings import Findings
from psworker.ctl.history.lines import Start, read_starts
from psworker.ctl.tables import count_text

Values = dict[str, Any]

SHARDS = ("shard-0", "shard-1")
CHUNKS = {"shard-0": (0, 2), "shard-1": (1,)}
WORKERS = ("a", "b")
CLOCK_COUNT = 3


def push(worker_id: str, sequence: int, incarnation: int = 1) -> list[Any]:
    return [worker_id, incarnation, sequence]


@dataclass
class Histories:
    """Files of a run, to be changed before they are written."""

    files: dict[str, list[Values]] = field(default_factory=dict)

    def begin(self, process: str, role: str, **facts: object) -> None:
        self.add(
            process, "begin", format=1, job="j", process=process, role=role, **facts
        )

    def add(self, process: str, kind: str, /, **values: object) -> None:
        self.files.setdefault(process, []).append(
            {**copy.deepcopy(values), "type": kind}
        )

    def find(self, process: str, kind: str, **wanted: object) -> Values:
        """The first line of a kind with these values."""
        return next(
            line
            for line in self.files[process]
            if line["type"] == kind and wanted.items() <= line.items()
        )

    def remove(self, process: str, kind: str, **wanted: object) -> Values:
        line = self.find(process, kind, **wanted)
        self.files[process].remove(line)
        return line

    def check(self, folder: Path) -> HistoryReport:
        for process, lines in self.files.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{process}.jsonl").write_text(text)
        return check_history([folder])


def record(generation: int, members: tuple[str, ...], **values: object) -> Values:
    return {
        "generation": generation,
        "members": [[worker_id, 1, 0, 0] for worker_id in members],
        "departures": [],
        "mode": "bsp",
        "bound": 0,
        "mode_clock": 0,
        "skipped": [],
        **values,
    }


def good(mode: str = "bsp", bound: int = 0) -> Histories:
    """Two workers, two shards, three clocks, then everybody leaves."""
    run = Histories()
    first = record(1, WORKERS, mode=mode, bound=bound)
    last = record(
        2,
        (),
        mode=mode,
        bound=bound,
        departures=[["a", 1, CLOCK_COUNT, False], ["b", 1, CLOCK_COUNT, False]],
    )
    run.begin("coordinator", "coordinator", shard_count=2)
    run.add("coordinator", "record", **first)
    run.add("coordinator", "record", **last)
    for index, shard in enumerate(SHARDS):
        run.begin(shard, "shard", shard=index, incarnation=1, shard_count=2)
        run.add(shard, "record", **first, torn=0)
        for clock in range(1, CLOCK_COUNT + 1):
            add_clock(run, shard, clock, mode=mode, bound=bound)
        run.add(shard, "record", **last, torn=0)
    for worker_id in WORKERS:
        add_worker(run, worker_id, mode=mode, bound=bound)
    return run


def add_clock(run: Histories, shard: str, clock: int, *, mode: str, bound: int) -> None:
    pushes = [push(worker_id, clock) for worker_id in WORKERS]
    for each in pushes:
        run.add(shard, "opened", push=each, clock=clock)
        run.add(shard, "trailer", push=each, chunks=list(CHUNKS[shard]), weight=1.0)
    for chunk in CHUNKS[shard]:
        run.add(shard, "applied", chunk=chunk, clock=clock, pushes=pushes, torn=[])
    for each in pushes:
        run.add(shard, "done", push=each, outcome="applied", clock=clock)
    for each in pushes:
        run.add(shard, "reply", push=each, **reply(clock, mode=mode, bound=bound))


def reply(clock: int, *, mode: str = "bsp", bound: int = 0) -> Values:
    return {
        "op": "push",
        "outcome": "applied",
        "generation": 1,
        "clock": clock,
        "version": 2 * clock,
        "frontier": clock,
        "mode": mode,
        "bound": bound,
        "staleness": 0,
    }


def add_worker(run: Histories, worker_id: str, *, mode: str, bound: int) -> None:
    process = f"worker-{worker_id}-1"
    run.begin(process, "worker", worker=[worker_id, 1])
    for clock in range(1, CLOCK_COUNT + 1):
        each = push(worker_id, clock)
        run.add(process, "invoke", op="push", push=each, clock=clock)
        replies = [
            {"shard": index, "incarnation": 1, **reply(clock, mode=mode, bound=bound)}
            for index in range(2)
        ]
        run.add(process, "ok", op="push", push=each, outcome="applied", replies=replies)


def broken(report: HistoryReport) -> dict[str, str]:
    """The first break of each promise that was broken."""
    found: dict[str, str] = {}
    for each in report.findings.breaks:
        found.setdefault(each.promise, f"{each.place} {each.text}")
    return found


@pytest.mark.parametrize(("mode", "bound"), [("bsp", 0), ("ssp", 2), ("asp", 0)])
def test_a_good_run_is_clean(tmp_path: Path, mode: str, bound: int) -> None:
    report = good(mode, bound).check(tmp_path)
    assert broken(report) == {}
    assert all(report.findings.checks[p] for p in ("G1", "G3", "G4", "files"))
    assert bool(report.findings.checks["G6"]) is (mode != "asp")
    counts = report.findings.counts
    assert (counts["pushes"], counts["acknowledged"], counts["lost"]) == (6, 6, 0)
    assert "6 acknowledged" in report.to_text()


def applied_twice(run: Histories) -> None:
    line = run.find("shard-0", "applied", chunk=2, clock=2)
    run.files["shard-0"].insert(run.files["shard-0"].index(line) + 1, dict(line))


def applied_after_the_end(run: Histories) -> None:
    line = run.remove("shard-0", "applied", chunk=2, clock=3)
    run.files["shard-0"].append(line)


def acknowledged_and_lost(run: Histories) -> None:
    for shard in SHARDS:
        run.remove(shard, "done", push=push("a", 3))


def applied_in_part(run: Histories) -> None:
    run.find("shard-0", "applied", chunk=2, clock=2)["pushes"] = [push("b", 2)]


def dropped_and_applied(run: Histories) -> None:
    for shard in SHARDS:
        run.find(shard, "done", push=push("a", 3))["outcome"] = "dropped"
    run.find("worker-a-1", "ok", push=push("a", 3))["outcome"] = "dropped"


def acknowledged_beyond_its_last(run: Histories) -> None:
    for process in (*SHARDS, "coordinator"):
        run.find(process, "record", generation=2)["departures"][0][2] = 2
    for shard in SHARDS:
        run.find(shard, "record", generation=2)["torn"] = 1


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (applied_twice, "chunk 2 of push 2 of a/1 a second time, after line"),
        (applied_after_the_end, "without chunk 2"),
        (acknowledged_and_lost, "acknowledged as applied, and on shard 0 it is not"),
        (applied_in_part, "ended push 2 of a/1 as applied without chunk 2"),
        (dropped_and_applied, "as dropped with 2 of its chunks applied"),
        (acknowledged_beyond_its_last, "beyond push 2, its last"),
    ],
)
def test_exactly_once_is_checked(
    tmp_path: Path, breaks: Callable[[Histories], None], said: str
) -> None:
    run = good()
    breaks(run)
    report = run.check(tmp_path)
    assert said in broken(report)["G1"]
    assert "G1 broken at " in report.to_text()


def test_lost_and_double_pushes_are_counted(tmp_path: Path) -> None:
    run = good()
    applied_twice(run)
    acknowledged_and_lost(run)
    counts = run.check(tmp_path).findings.counts
    assert counts["applied_twice"] == 2  # both pushes of the clock
    assert counts["lost"] == 2  # on both shards


def test_an_unknown_push_may_be_applied_or_not(tmp_path: Path) -> None:
    run = good()
    for worker_id in WORKERS:
        ended = run.remove(f"worker-{worker_id}-1", "ok", push=push(worker_id, 3))
        if worker_id == "a":
            run.add(f"worker-{worker_id}-1", "unknown", **{**ended, "replies": []})
    report = run.check(tmp_path)
    assert broken(report) == {}
    assert report.findings.counts["unknown_applied"] == 2


def evicted_and_back(run: Histories, kind: str, **values: object) -> None:
    """The first start of `a` never heard of its last push; the second one asked."""
    run.remove("worker-a-1", "ok", push=push("a", 3))
    run.begin("worker-a-2", "worker", worker=["a", 2])
    run.add("worker-a-2", kind, op="push", push=push("a", 3), **values)


def test_a_later_start_may_find_out_what_became_of_a_push(tmp_path: Path) -> None:
    run = good()
    evicted_and_back(run, "ok", outcome="duplicate")
    report = run.check(tmp_path)
    assert broken(report) == {}
    assert report.findings.counts["acknowledged"] == 6


def test_a_push_that_was_thrown_away_counts_nowhere(tmp_path: Path) -> None:
    run = good()
    evicted_and_back(run, "fail")
    said = "thrown away when its worker was evicted, and on shard 0 it is applied"
    assert said in broken(run.check(tmp_path))["G1"]


def one_shard_only(run: Histories) -> None:
    """What the worker never heard of is done on shard 0 alone."""
    run.remove("worker-a-1", "ok", push=push("a", 3))
    run.remove("shard-1", "done", push=push("a", 3))


def other_ends(run: Histories) -> None:
    run.remove("worker-a-1", "ok", push=push("a", 3))
    run.find("shard-1", "done", push=push("a", 3))["outcome"] = "skipped"


def torn_and_not_told(run: Histories) -> None:
    run.remove("worker-a-1", "ok", push=push("a", 3))
    acknowledged_beyond_its_last(run)
    run.find("shard-0", "record", generation=2)["torn"] = 0


def torn_in_two_phases(run: Histories) -> None:
    run.remove("worker-a-1", "ok", push=push("a", 3))
    acknowledged_beyond_its_last(run)
    run.files["shard-1"][0]["atomicity"] = "clock"


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (one_shard_only, "push 3 of a/1 is applied on shard 0, not done on shard 1"),
        (other_ends, "push 3 of a/1 is applied on shard 0, skipped on shard 1"),
        (torn_and_not_told, "shard 0 has 1 torn push and reported 0"),
        (torn_in_two_phases, "although steps are two-phase"),
    ],
)
def test_all_or_nothing_is_checked(
    tmp_path: Path, breaks: Callable[[Histories], None], said: str
) -> None:
    run = good()
    breaks(run)
    assert said in broken(run.check(tmp_path))["G3"]


def test_a_torn_push_that_was_told_is_no_break(tmp_path: Path) -> None:
    run = good()
    run.remove("worker-a-1", "ok", push=push("a", 3))
    acknowledged_beyond_its_last(run)
    report = run.check(tmp_path)
    assert broken(report) == {}
    assert report.findings.counts["torn"] == 2


def test_what_is_under_way_when_histories_end_is_no_break(tmp_path: Path) -> None:
    run = good()
    for process in (*SHARDS, "coordinator"):
        run.remove(process, "record", generation=2)
    run.remove("shard-1", "done", push=push("a", 3))
    run.remove("worker-a-1", "ok", push=push("a", 3))
    for worker_id in WORKERS:
        run.remove("shard-1", "reply", push=push(worker_id, 3))
    assert broken(run.check(tmp_path)) == {}


def out_of_order(run: Histories) -> None:
    early = run.remove("shard-0", "applied", chunk=0, clock=3)
    late = run.find("shard-0", "applied", chunk=0, clock=2)
    run.files["shard-0"].insert(run.files["shard-0"].index(late), early)


def version_back(run: Histories) -> None:
    run.find("shard-0", "reply", push=push("b", 3))["version"] = 1


def frontier_back_for_a_worker(run: Histories) -> None:
    line = run.find("worker-b-1", "ok", push=push("b", 3))
    line["replies"][1].update(frontier=1, clock=1)


def sequences_back(run: Histories) -> None:
    for kind in ("invoke", "ok"):
        line = run.remove("worker-a-1", kind, push=push("a", 2))
        run.files["worker-a-1"].append(line)


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (out_of_order, "applied chunk 0 of push 2 of a/1 after push 3"),
        (version_back, "answered with version 1 after 6 at shard-0.jsonl:"),
        (frontier_back_for_a_worker, "was told frontier 1 by shard 1 after 2"),
        (sequences_back, "push 2 of a/1 was begun after push 3"),
    ],
)
def test_order_is_checked(
    tmp_path: Path, breaks: Callable[[Histories], None], said: str
) -> None:
    run = good()
    breaks(run)
    assert said in broken(run.check(tmp_path))["G4"]


def bound_in_an_answer(run: Histories) -> None:
    line = run.find("worker-b-1", "ok", push=push("b", 3))
    line["replies"][1].update(clock=6)


def answered_before_applied(run: Histories) -> None:
    """The answer claims what is applied only afterwards."""
    lines = run.files["shard-0"]
    done = run.remove("shard-0", "done", push=push("b", 3))
    lines.insert(lines.index(run.find("shard-0", "record", generation=2)), done)


def frontier_beyond_what_is_applied(run: Histories) -> None:
    line = run.find("shard-0", "reply", push=push("a", 1))
    line.update(frontier=2)
    run.find("shard-0", "reply", push=push("b", 1)).update(frontier=2)


@pytest.mark.parametrize(
    ("mode", "breaks", "said"),
    [
        ("ssp", bound_in_an_answer, "b/1 at clock 6 was given frontier 3 by shard 1"),
        ("bsp", answered_before_applied, "as of clock 3 with only clock 2 of b/1"),
        ("ssp", answered_before_applied, "as of clock 3 with only clock 2 of b/1"),
        ("ssp", frontier_beyond_what_is_applied, "as of clock 2 with only clock 1"),
    ],
)
def test_the_bound_is_checked(
    tmp_path: Path, mode: str, breaks: Callable[[Histories], None], said: str
) -> None:
    run = good(mode, 2)
    breaks(run)
    assert said in broken(run.check(tmp_path))["G6"]


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
    assert list(promises) == ["files", "G1", "G3", "G4", "G6"]
    assert "a second time" in promises["G1"]["breaks"][0]["text"]
    json.dumps(told)
