"""The check of histories: a good one passes, one broken for each promise does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.made_histories import (
    SHARDS,
    WORKERS,
    Histories,
    applied_twice,
    broken,
    good,
    push,
    returned,
)


@pytest.mark.parametrize(("mode", "bound"), [("bsp", 0), ("ssp", 2), ("asp", 0)])
def test_a_good_run_is_clean(tmp_path: Path, mode: str, bound: int) -> None:
    report = good(mode, bound).check(tmp_path)
    assert broken(report) == {}
    assert all(report.findings.checks[p] for p in ("G1", "G3", "G4", "files"))
    assert bool(report.findings.checks["G6"]) is (mode != "asp")
    counts = report.findings.counts
    assert (counts["pushes"], counts["acknowledged"], counts["lost"]) == (6, 6, 0)
    assert "6 acknowledged" in report.to_text()


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


def sent_again(run: Histories) -> None:
    line = run.find("worker-a-1", "invoke", push=push("a", 3))
    run.files["worker-a-1"].append(line)


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
        (sent_again, "push 3 of a/1 was sent again after it was acknowledged"),
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


def test_what_was_dropped_may_be_sent_again(tmp_path: Path) -> None:
    run = good()
    dropped_and_applied(run)
    sent_again(run)
    texts = [each.text for each in run.check(tmp_path).findings.breaks]
    assert texts, "it was applied though it was dropped"
    assert not [text for text in texts if "sent again" in text]


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


def test_a_job_that_returned_to_a_checkpoint_is_checked_life_by_life(
    tmp_path: Path,
) -> None:
    run = returned()
    # A worker that lives on finds out that its last push counts no more.
    run.add("worker-a-2", "fail", op="push", push=push("a", 3))
    report = run.check(tmp_path)
    assert broken(report) == {}
    counts = report.findings.counts
    assert (counts["lives"], counts["worker_starts"], counts["shards"]) == (2, 4, 2)
    assert (counts["pushes"], counts["acknowledged"], counts["lost"]) == (12, 12, 0)
    assert "0 evictions, 1 return to a checkpoint" in report.to_text()


@pytest.mark.parametrize("life", ["", "-2"])
def test_each_life_keeps_the_promises(tmp_path: Path, life: str) -> None:
    run = returned()
    incarnation = 2 if life else 1
    run.remove(f"shard-1{life}", "done", push=push("a", 3, incarnation))
    report = run.check(tmp_path)
    assert f"push 3 of a/{incarnation} was acknowledged as" in broken(report)["G1"]
    assert report.findings.counts["lost"] == 1


def test_a_shard_whose_history_of_a_life_is_missing_is_named(tmp_path: Path) -> None:
    run = returned()
    del run.files["shard-1-2"]
    assert "the history of shard 1 is missing" in broken(run.check(tmp_path))["files"]


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
        (frontier_back_for_a_worker, "received frontier 1 from shard 1 after 2"),
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
        ("ssp", bound_in_an_answer, "b/1 at clock 6 received frontier 3 from shard 1"),
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


# Mode quorum


def merged() -> Histories:
    """A good run whose clocks were closed by a quorum of 1 and a window of 50 ms."""
    run = good("quorum")
    for lines in run.files.values():
        for line in lines:
            if line["type"] == "record":
                line.update(quorum=1, grace_window_ms=50, terms_clock=0)
    lines = run.files["shard-0"]
    for clock in (1, 2, 3):
        place = lines.index(run.find("shard-0", "applied", clock=clock))
        merge = {
            "type": "merge",
            "clock": clock,
            "quorum": 1,
            "needed": 1,
            "active": 2,
            "window_ms": 50,
            "closed_ms": 120,
            "arrivals": [
                [*push("a", clock), 1.0, 100, None],
                [*push("b", clock), 1.0, 120, None],
            ],
        }
        lines.insert(place, merge)
    return run


def merge_of(run: Histories) -> dict[str, Any]:
    return run.find("shard-0", "merge", clock=2)


def another_weight(run: Histories) -> None:
    merge_of(run)["arrivals"][1][3] = 3.0


def another_slack(run: Histories) -> None:
    run.find("shard-0", "trailer", push=push("b", 2))["slack_ms"] = 7


def another_quorum(run: Histories) -> None:
    merge_of(run)["quorum"] = 2


def too_few(run: Histories) -> None:
    for line in run.files["shard-0"]:
        line["quorum"] = 2
    del merge_of(run)["arrivals"][0]


def too_early(run: Histories) -> None:
    del merge_of(run)["arrivals"][1]


def of_more_than_were_merged(run: Histories) -> None:
    too_early(run)
    merge_of(run)["closed_ms"] = 150


def closed_twice(run: Histories) -> None:
    lines = run.files["shard-0"]
    lines.insert(lines.index(merge_of(run)), dict(merge_of(run)))


def test_merges_of_a_good_run_are_checked(tmp_path: Path) -> None:
    report = merged().check(tmp_path)
    assert broken(report) == {}
    assert report.findings.checks["G40"] > 12


def test_a_window_that_ends_with_a_slack_is_no_break(tmp_path: Path) -> None:
    run = merged()
    too_early(run)
    merge_of(run)["arrivals"][0][5] = 20
    run.find("shard-0", "trailer", push=push("a", 2))["slack_ms"] = 20
    for shard in SHARDS:
        for line in run.files[shard]:
            if line["type"] == "applied" and line["clock"] == 2:
                line["pushes"] = [push("a", 2)]
    assert "G40" not in broken(run.check(tmp_path))


@pytest.mark.parametrize(
    ("breaks", "said"),
    [
        (another_weight, "with weight 3.0 and slack None ms of push 2 of b/1"),
        (another_slack, "whose trailer says Sent(weight=1.0, slack_ms=7)"),
        (another_quorum, "of 2 and a window of 50 ms, where the record has 1 and 50"),
        (too_few, "with 1 pushes, not 2"),
        (too_early, "at 120 ms, though its window ended at 150 ms and 1 more"),
        (of_more_than_were_merged, "applied push 2 of b/1 in clock 2, which was"),
        (closed_twice, "a second time, after"),
    ],
)
def test_how_clocks_were_closed_is_checked(
    tmp_path: Path, breaks: Callable[[Histories], None], said: str
) -> None:
    run = merged()
    breaks(run)
    assert said in broken(run.check(tmp_path))["G40"]
