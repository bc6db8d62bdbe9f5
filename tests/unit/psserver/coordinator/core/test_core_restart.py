"""A coordinator that was started again goes on where its predecessor was."""

import pytest

from psserver.coordinator.core.coordinator_effects import Persist, Prepare
from psserver.coordinator.core.cut import Cut
from psserver.coordinator.core.data.epoch_ledger import EpochLedger
from psserver.coordinator.core.fence import NUMBERS_PER_START
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.leased_data import DataRange, EpochShape
from pswire.membership import FenceKind, Record, WorkerKey, WorkerState
from pswire.reasons import ErrorReason, Refusal
from tests.doubles.core_values import SCHEMA, TERMS, departure, key, record
from tests.doubles.driven_coordinator import DrivenCoordinator, WritingCore
from tests.refusals import refused

SETTINGS = CoordinatorSettings(job_id="job", shard_count=1, lease_ttl_ms=10_000)


def restarted(
    newest: Record | None,
    *,
    start_count: int = 1,
    settings: CoordinatorSettings = SETTINGS,
) -> WritingCore:
    core = WritingCore(settings, start_count)
    core.restore(
        terms=TERMS,
        record=newest,
        incarnations={"a": 1, "b": 3},
        processes={key("a"): "process-a"},
        now_ms=0,
    )
    slot = core.register_shard(process_id="shard", address="host:1", now_ms=0)
    assert core.progress.take_effects() == [Persist(shards=(slot,))]
    core.shard_watching(slot, 0)
    return core


def test_the_newest_record_stands() -> None:
    newest = record({"a": 0}, generation=7)
    core = restarted(newest)

    assert core.record is newest
    assert core.progress.take_effects() == []


def test_no_number_comes_twice_though_cuts_leave_no_record() -> None:
    for start_count in (1, 2):
        core = restarted(record({"a": 0}, generation=7), start_count=start_count)
        core.want_cut(0)

        (prepare,) = core.progress.take_effects()
        assert isinstance(prepare, Prepare)
        assert prepare.fence_number == start_count * NUMBERS_PER_START + 1
        # A shard that is frozen in a fence of the process before goes on.
        assert core.progress.fences.closed_number == start_count * NUMBERS_PER_START
        decided = core.snapshots.decide(
            Cut(clock=1, sequences=(), version=1), generation=7
        )
        assert decided.snapshot_id == start_count * NUMBERS_PER_START + 1


def test_one_that_stood_still_itself_loses_nobody_for_a_lease() -> None:
    job = DrivenCoordinator.running("a")
    entry = job.core.roster.entry(key("a"))
    job.core.have_patience(job.now_ms)
    job.core.worker_broken(entry, job.now_ms)
    job.pass_time(9_999)
    assert entry.state is WorkerState.SUSPECT
    job.core.worker_watching(entry, job.now_ms)
    job.pass_time(1)
    assert entry.state is WorkerState.MEMBER

    job.core.worker_broken(entry, job.now_ms)
    job.pass_time(500)
    assert entry.state is WorkerState.LOST


def test_nobody_is_lost_before_a_lease_has_passed() -> None:
    core = restarted(record({"a": 0}, generation=7))
    entry = core.roster.entry(key("a"))
    core.tick(10_499)
    assert entry.state is WorkerState.SUSPECT
    core.tick(10_500)
    assert [e.state for e in core.roster.in_state(*WorkerState)] == [WorkerState.LOST]


def test_with_a_short_lease_all_have_time_to_connect_again() -> None:
    """A connection that was refused is tried again after up to 2.4 s."""
    settings = CoordinatorSettings(job_id="job", shard_count=1, lease_ttl_ms=1_000)
    core = restarted(record({"a": 0}, generation=7), settings=settings)
    core.tick(5_499)
    assert core.roster.entry(key("a")).state is WorkerState.SUSPECT
    core.tick(5_500)
    assert core.roster.in_state(WorkerState.LOST) != []


def test_a_member_that_comes_back_is_a_member_again() -> None:
    core = restarted(record({"a": 0}, generation=7))
    entry = core.register_worker(
        process_id="process-a", worker_id="a", address="host:1", now_ms=0
    )
    core.worker_watching(entry, 5_000)
    core.tick(1_000_000)

    assert (entry.worker, entry.state) == (key("a"), WorkerState.MEMBER)


def restarted_with(processes: dict[WorkerKey, str]) -> WritingCore:
    core = WritingCore(SETTINGS, 1)
    core.restore(
        terms=TERMS,
        record=record({"a": 0}, generation=7),
        incarnations={"a": 1, "b": 3},
        processes=processes,
        now_ms=0,
    )
    return core


def test_one_that_waits_to_join_keeps_its_place() -> None:
    core = restarted_with({key("a"): "process-a", key("b/3"): "process-b"})
    entry = core.roster.entry(key("b/3"))
    assert entry.state is WorkerState.REGISTERED
    again = core.register_worker(
        process_id="process-b", worker_id="b", address="host:1", now_ms=1
    )
    assert again is entry
    core.worker_watching(entry, 1)
    core.tick(1_000_000)
    assert entry.state is WorkerState.REGISTERED


def test_one_that_waited_to_join_and_is_gone_keeps_its_id_for_a_lease() -> None:
    core = restarted_with({key("a"): "process-a", key("b/3"): "process-b"})
    core.tick(9_999)
    assert core.roster.present("b") is not None
    core.tick(10_000)
    assert core.roster.present("b") is None


def test_a_start_that_is_over_is_not_taken_for_one_that_waits() -> None:
    core = restarted_with({key("a"): "process-a", key("b/2"): "process-b"})
    with pytest.raises(Refusal, match="b/2 is closed"):
        core.roster.entry(key("b/2"))


def test_one_that_asks_to_leave_again_has_left() -> None:
    """Its record was written, and the process died before it could say so."""
    gone = departure("b/3", last_clock=4)
    core = restarted(record({"a": 0}, generation=7, departures=(gone,)))
    entry = core.roster.entry(key("b/3"))
    core.leave(entry, sequence=4, now_ms=0)

    assert entry.state is WorkerState.LEFT
    assert core.progress.take_effects() == []
    assert core.register_worker(
        process_id="q", worker_id="b", address="host:1", now_ms=0
    ).worker == key("b/4")


def test_incarnations_go_on_counting() -> None:
    core = restarted(None)
    entry = core.register_worker(
        process_id="q", worker_id="b", address="host:1", now_ms=0
    )
    assert entry.worker == key("b/4")


def test_the_schema_that_shards_have_been_told_stands_before_the_start_too() -> None:
    core = restarted(None)
    assert core.model.schema == SCHEMA


def test_a_job_that_had_not_started_starts() -> None:
    driven = DrivenCoordinator(shard_count=1)
    driven.core = restarted(None)
    driven.add_worker("b")

    assert driven.fence_kinds() == [FenceKind.START]
    driven.report(0)
    assert driven.record.generation == 1


def test_leased_data_of_members_stays_and_that_of_others_is_dealt_again() -> None:
    core = restarted(record({"a": 0}, generation=7))
    shape = EpochShape(position_count=4, batch_size=1, drop_last=False)
    ledger = EpochLedger("loader", 0, shape)
    participants = (key("a"), key("b/3"))
    for worker in participants:
        ledger.lease(worker, participants, 1)
    core.restore_ledger((ledger,))

    assert core.participants("loader") == (key("a"),)
    assert ledger.held == {key("a"): {DataRange("loader", 0, 0, 1)}}
    assert list(ledger.returned) == [DataRange("loader", 0, 1, 2)]


def test_members_without_data_take_part_in_the_rounds_again() -> None:
    """Or the order of the data would depend on when the coordinator was restarted."""
    core = restarted(record({"a": 0, "b/3": 0}, generation=7))
    others = (key("a"), key("b/3"), key("c"))
    core.restore_ledger((), (("loader", others), ("other", (key("c"),))))

    assert core.participants("loader") == (key("a"), key("b/3"))
    assert core.participants("other") == ()


def test_a_replacement_is_not_taken_for_the_lost_one_whose_id_it_has() -> None:
    """The lost one is the member of the record, and stays lost."""
    core = WritingCore(SETTINGS, 1)
    core.restore(
        terms=TERMS,
        record=record({"a": 0}, generation=7),
        incarnations={"a": 2},
        processes={key("a/1"): "lost", key("a/2"): "replacement"},
        now_ms=0,
    )
    entry = core.register_worker(
        process_id="replacement", worker_id="a", address="host:1", now_ms=0
    )
    assert entry.worker == key("a/2")
    with refused(ErrorReason.WORKER_INCARNATION_STALE):
        core.roster.entry(key("a/1"))


def test_nobody_is_lost_for_a_lease_even_if_it_was_back() -> None:
    core = restarted(record({"a": 0}, generation=7))
    entry = core.roster.entry(key("a"))
    core.worker_watching(entry, 0)
    core.worker_broken(entry, 100)
    core.tick(9_999)
    assert entry.state is WorkerState.SUSPECT
    core.tick(10_000)
    assert entry.state is WorkerState.LOST
