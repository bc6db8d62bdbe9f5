"""What a shard tells of itself every second, and what its log says."""

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from psserver.shard.host.recorder import Recorder
from psserver.shard.rpc import progress_report
from psserver.shard.rpc.progress_report import ProgressReport
from psserver.shard.rpc.push_codec import waiting_message
from pswire.membership import Member, Mode
from pswire.membership_codec import read_identity, read_sequences
from tests.doubles.core_values import key
from tests.doubles.served_shard import ServedShard


@pytest.fixture
async def shard() -> AsyncIterator[ServedShard]:
    with ServedShard(delay_compensation=0.5) as shard:
        yield shard


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_report, "WAITING_INTERVAL_MS", 0)


async def test_it_tells_where_everybody_stands(shard: ServedShard) -> None:
    shard.start("abc", mode=Mode.ASP)
    await shard.push("a", 1).finished()
    await shard.push("a", 2).finished()
    await shard.push("b", 1).finished()
    open_call = shard.push("c", 1, {})
    await open_call.finished()

    message = ProgressReport(shard.host).message()

    assert (message.frontier, message.version) == (1, 4)
    assert read_sequences(message.done) == ((key("a"), 2), (key("b"), 1), (key("c"), 1))
    assert list(message.staleness_counts)[:3] == [2, 0, 1]
    assert message.parameter_bytes == 4 * 4 + 2 * 8 + 3 * 8
    # The seeder's copy of all, and two of what was pushed for.
    assert message.optimizer_bytes == 56 + 2 * 32
    assert not message.contradicting


async def test_it_counts_pushes_under_way(shard: ServedShard) -> None:
    shard.start("ab")
    shard.push("a", 1)
    await shard.until(lambda: shard.host.model.core.queued_push_count == 1)

    assert ProgressReport(shard.host).message().queued_push_count == 1


async def test_it_names_whose_bytes_were_not_what_was_said(shard: ServedShard) -> None:
    shard.start("ab")
    lying = shard.push("a", 1, {0: float("nan")})
    await shard.push("b", 1, {0: 1.0}).finished()
    await lying.finished()

    message = ProgressReport(shard.host).message()

    assert list(map(read_identity, message.contradicting)) == [key("a")]


async def test_the_log_says_whom_a_push_waits_for(
    shard: ServedShard, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    shard.start("ab")
    shard.push("a", 1)
    await shard.until(lambda: shard.host.members.oldest_ms is not None)

    with caplog.at_level(logging.WARNING):
        message = ProgressReport(shard.host).message()

    assert [each.name for each in message.waiting.awaited] == ["b"]
    assert "a push has waited 0 s for clock 1 to be complete" in caplog.text
    assert "'b' (no push yet)" in caplog.text


async def test_the_log_says_a_wait_at_growing_intervals(
    shard: ServedShard,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shard.start("ab")
    shard.push("a", 1)
    await shard.until(lambda: shard.host.members.oldest_ms is not None)
    begun_ms = shard.host.members.oldest_ms
    assert begun_ms is not None
    report = ProgressReport(shard.host)

    with caplog.at_level(logging.WARNING):
        for waited_ms in range(1_000, 41_000, 1_000):
            now_ms = begun_ms + waited_ms
            monkeypatch.setattr(progress_report, "now_ms", lambda now=now_ms: now)
            report.message()

    said = [each.getMessage().partition(" for ")[0] for each in caplog.records]
    assert said == [f"a push has waited {seconds} s" for seconds in (5, 10, 20, 40)]


async def test_nobody_is_named_when_nothing_is_due(
    shard: ServedShard, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    shard.start("ab", mode=Mode.ASP)

    message = ProgressReport(shard.host).message()

    assert not message.HasField("waiting")
    assert not caplog.records


async def test_whom_it_waits_for_is_told_with_both_measures(
    shard: ServedShard, impatient: None
) -> None:
    shard.start("ab")
    first = [shard.push(name, 1) for name in "ab"]
    for call in first:
        await call.finished()
    shard.host.note_lost({key("b"): 12_000})
    shard.push("a", 2)
    await shard.until(lambda: shard.host.members.oldest_ms is not None)

    (awaited,) = ProgressReport(shard.host).message().waiting.awaited

    assert (awaited.name, awaited.clock) == ("b", 1)
    assert awaited.lost_ms >= 12_000
    assert awaited.step_ms >= 0


async def test_workers_are_told_what_the_coordinator_waits_for(
    shard: ServedShard, impatient: None
) -> None:
    disk = "room on the coordinator's disk, or its repair (disk full)"
    shard.start("ab")
    shard.push("a", 1)
    await shard.until(lambda: shard.host.members.oldest_ms is not None)
    own = waiting_message(shard.host, 0).reason
    assert own

    shard.host.note_lost({key("b"): 12_000}, coordinator_wait=disk)
    assert waiting_message(shard.host, 0).reason == f"{disk}; {own}"
    report = ProgressReport(shard.host).message()
    assert report.waiting.reason == own, "the coordinator's words come back to it"

    shard.host.set_silent(0)
    assert "disk" not in waiting_message(shard.host, 0).reason, "it may be over"
    shard.host.set_silent(None)

    shard.host.note_lost({})
    assert waiting_message(shard.host, 0).reason == own


async def test_a_finished_job_waits_only_since_somebody_has_joined(
    shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0]
    monkeypatch.setattr(progress_report, "now_ms", lambda: clock[0])
    first = shard.start("a")
    report = ProgressReport(shard.host)
    report.message()
    left = replace(first, fence_number=2, generation=2, members=())
    shard.host.install_record(left)
    clock[0] = 44_000
    assert not report.message().HasField("waiting")
    joined = (Member(worker=key("b"), rank=0, base_clock=0),)
    shard.host.install_record(
        replace(left, fence_number=3, generation=3, members=joined)
    )

    clock[0] = 48_000
    assert not report.message().HasField("waiting")
    clock[0] = 51_000
    waiting = report.message().waiting

    assert [each.name for each in waiting.awaited] == ["b"]
    assert waiting.waited_ms == 7_000


async def test_it_says_whether_the_end_of_its_recording_is_known(
    shard: ServedShard, tmp_path: Path
) -> None:
    shard.start("a")
    report = ProgressReport(shard.host)
    shard.host.recorder = Recorder.open(
        tmp_path,
        shard_index=0,
        incarnation=1,
        settings=shard.host.settings,
        gib_max=0,
    )
    shard.host.recorder.begin(shard.host.model)
    first = report.message()
    assert first.recording_end
    assert not report.message().is_recording_end_known  # nobody has answered
    report.taken(first)
    assert report.message().is_recording_end_known
