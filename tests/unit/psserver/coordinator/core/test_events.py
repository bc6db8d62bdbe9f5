"""What a coordinator remembers of what has happened."""

from dataclasses import replace

from psserver.coordinator.core.events import (
    EVENT_COUNT_MAX,
    TEXT_BYTES_MAX,
    EventKind,
    Events,
)
from psserver.coordinator.core.shard_map import ShardStanding
from psserver.coordinator.rpc.status_report import events_message
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.limits import MESSAGE_BYTES_MAX, NAME_BYTES_MAX
from pswire.membership import Mode, ModeTerms, WorkerState
from tests.doubles.driven_coordinator import DrivenCoordinator


def _kinds(driven: DrivenCoordinator, after: int = 0) -> list[str]:
    return [event.kind.value for event in driven.core.events.after(after)]


def test_numbers_grow_over_starts_and_the_oldest_events_go() -> None:
    events = Events()
    for at_ms in range(EVENT_COUNT_MAX + 5):
        events.add(EventKind.WORKER_SUSPECT, "x" * 5_000, at_ms)
    kept = list(events.after(0))
    assert [kept[0].number, kept[-1].number] == [6, EVENT_COUNT_MAX + 5]
    assert len(kept) == EVENT_COUNT_MAX
    assert len(kept[0].text) == 2_000
    assert [e.number for e in events.after(EVENT_COUNT_MAX + 3)] == [1_004, 1_005]

    again = Events(start_count=1)
    again.add(EventKind.COORDINATOR_STARTED, "", 0)
    assert again.newest_number > events.newest_number


def test_all_events_of_long_names_and_texts_fit_one_message() -> None:
    events = Events()
    name, text = "\N{KITE}" * (NAME_BYTES_MAX // 4), "\N{KITE}\udc80" * 2_000
    for at_ms in range(EVENT_COUNT_MAX):
        events.add(EventKind.CHECKPOINT_FAILED, text, at_ms, worker_id=name)
    message = events_message(events.after(0), 0.0)
    assert message.ByteSize() < MESSAGE_BYTES_MAX / 2
    assert message.events[0].text.startswith("\N{KITE}?\N{KITE}")


def test_the_life_of_a_job_is_told_in_its_order() -> None:
    driven = DrivenCoordinator.running("a", "b")
    assert _kinds(driven) == [
        "shard_registered",
        "shard_registered",
        "job_started",
        "worker_joined",
        "worker_joined",
    ]
    (*_, last) = driven.core.events.after(0)
    assert (last.worker_id, last.clock, last.text) == ("b", 0, "b has joined")


def test_a_worker_that_is_lost_and_evicted_leaves_its_traces() -> None:
    driven = DrivenCoordinator.running("a", "b")
    number = driven.core.events.newest_number
    (_, entry) = driven.core.roster.in_state(WorkerState.MEMBER)
    driven.lose(entry)
    driven.report_all()
    assert _kinds(driven, number) == ["worker_suspect", "worker_lost", "worker_evicted"]


def test_a_shard_that_is_away_for_a_moment_leaves_its_traces() -> None:
    driven = DrivenCoordinator.running("a")
    number = driven.core.events.newest_number
    driven.break_shard(1)
    driven.core.shard_watching(driven.core.shards.slots[1], driven.now_ms)
    assert _kinds(driven, number) == ["shard_lost", "shard_returned"]
    assert {e.shard_index for e in driven.core.events.after(number)} == {1}


def test_a_recording_that_ends_early_is_told_once() -> None:
    driven = DrivenCoordinator.running("a")
    core, number = driven.core, driven.core.events.newest_number
    for text in ("", "the disk is full", "the disk is full"):
        standing = ShardStanding(heard_ms=0, applied_clock=7, recording_end=text)
        core.take_standing(core.shards.slots[1], standing, driven.now_ms)
    (event,) = core.events.after(number)
    assert (event.kind, event.shard_index, event.clock) == ("recording_ended", 1, 7)
    assert event.text == (
        "The recording of shard 1 has ended, and training goes on: the disk is full"
    )
    core.take_standing(
        core.shards.slots[1],
        ShardStanding(heard_ms=0, recording_end="é" * TEXT_BYTES_MAX),
        driven.now_ms,
    )
    kept = core.shards.slots[1].standing.recording_end
    assert kept == "é" * (TEXT_BYTES_MAX // 2)


def test_a_coordinator_that_is_started_again_does_not_repeat_that() -> None:
    driven = DrivenCoordinator.running("a")
    core, number = driven.core, driven.core.events.newest_number
    standing = ShardStanding(heard_ms=0, recording_end="full")
    known = replace(standing, is_recording_end_known=True)
    core.take_standing(core.shards.slots[0], known, driven.now_ms)
    assert not list(core.events.after(number))
    assert core.shards.slots[0].standing.recording_end == "full"
    # Its first report of that got lost with the coordinator before.
    core.take_standing(core.shards.slots[1], standing, driven.now_ms)
    assert _kinds(driven, number) == ["recording_ended"]


def test_another_mode_and_the_end_of_a_job_are_events() -> None:
    settings = CoordinatorSettings(job_id="job", shard_count=1)
    driven = DrivenCoordinator.running("a", settings=settings)
    number = driven.core.events.newest_number
    driven.core.set_mode(ModeTerms(Mode.SSP, 3), driven.now_ms)
    driven.report_all()
    (changed,) = driven.core.events.after(number)
    assert (changed.kind, changed.text) == (
        EventKind.MODE_CHANGED,
        "The mode is ssp, at most 3 clocks apart now",
    )
    (entry,) = driven.core.roster.in_state(WorkerState.MEMBER)
    driven.leave(entry)
    driven.report_all()
    assert _kinds(driven, changed.number) == ["worker_left", "job_finished"]
