"""Whoever a job waits for is named: in the status at once, in the log after a while."""

import logging

import pytest

from psserver.coordinator.core.shard_map import ShardStanding
from psserver.coordinator.host.data_leases import DataWait
from psserver.coordinator.host.job_waits import JobWaits
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.awaited import Awaited
from pswire.leased_data import EpochShape
from pswire.membership import Mode, ModeTerms, WorkerState
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator


class Watched:
    """A job whose waits are looked at ten times a second."""

    def __init__(self, driven: DrivenCoordinator) -> None:
        self.driven = driven
        self.waits = JobWaits(driven.core)

    def pass_time(self, duration_ms: int) -> None:
        for _ in range(duration_ms // 100):
            self.driven.pass_time(100)
            self.waits.look(self.driven.now_ms)

    def text(self) -> str:
        return self.waits.text(self.driven.now_ms)

    def lose(self, worker_id: str) -> None:
        entry = self.driven.core.roster.present(worker_id)
        assert entry is not None
        self.driven.core.worker_broken(entry, self.driven.now_ms)

    def tell(self, index: int, **standing: object) -> None:
        """A shard tells where it stands."""
        self.driven.core.shards.slots[index].standing = ShardStanding(
            heard_ms=self.driven.now_ms,
            **standing,  # type: ignore[arg-type]
        )


def settings(**changes: object) -> CoordinatorSettings:
    return CoordinatorSettings(job_id="job", shard_count=2, **changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def log_of_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "psserver.coordinator")


def test_a_start_names_who_is_missing_at_a_falling_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Watched(DrivenCoordinator(settings=settings(workers_min=2)))
    job.driven.add_shards(but=1)
    job.driven.add_worker("a")

    job.pass_time(200)
    assert job.text() == (
        "shard 1 (not connected yet), 1 more worker to call prepare() (1 of 2 have)"
    )
    assert caplog.messages == []

    job.pass_time(5_000)
    assert [m for m in caplog.messages if "prepare() (1 of 2 have)" in m]
    assert "for 5 s" in caplog.messages[0]
    job.pass_time(4_000)
    assert len(caplog.messages) == 1
    job.pass_time(2_000)
    assert len(caplog.messages) == 2
    job.pass_time(8_000)
    assert len(caplog.messages) == 2
    job.pass_time(2_000)
    assert len(caplog.messages) == 3


def test_the_wait_for_first_values_begins_when_all_have_joined() -> None:
    job = Watched(DrivenCoordinator(settings=settings()))
    job.driven.add_shards()
    job.pass_time(44_000)
    assert job.text().endswith("for 44 s")
    job.driven.add_worker("a")
    job.pass_time(3_000)
    assert job.text() == "the first values from a, for 3 s"


def test_a_lost_worker_below_the_floor_is_named_with_its_clock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = DrivenCoordinator(settings=settings(workers_min=2))
    two.add_worker("a")
    two.add_worker("b")
    two.add_shards()
    two.report_all()
    job = Watched(two)
    job.tell(0, done={key("a"): 9, key("b"): 4})
    job.tell(1, done={key("a"): 9, key("b"): 3})

    job.lose("b")
    job.pass_time(6_000)

    entry = two.core.roster.present("b")
    assert entry is not None
    assert entry.state is WorkerState.LOST
    assert "b (lost 6 s ago in step 4), until it comes back" in job.text()
    assert any("b (lost" in message for message in caplog.messages)


def test_a_shard_that_owes_a_fence_is_named_over_all_its_tries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Watched(DrivenCoordinator.running("a", "b"))
    job.tell(1, applied_clock=7)
    job.lose("b")
    job.pass_time(1_000)
    fence = job.driven.core.fence
    assert fence is not None
    job.driven.report(0)
    job.waits.note_report(0)
    assert "to confirm a change of the workers" not in job.text()

    # No fence lasts that long: each is given up and begun again.
    for _ in range(60):
        job.pass_time(100)
        if job.driven.core.fence is not None:
            job.driven.report(0)
    assert job.driven.core.fence is not fence

    assert (
        "shard 1 (no report for 7 s, at clock 7) to confirm a change of the workers"
        in job.text()
    )
    assert any(
        "to confirm a change of the workers" in message for message in caplog.messages
    )

    job.driven.report_all()
    job.pass_time(200)
    assert "to confirm a change of the workers" not in job.text()


def test_fences_that_follow_each_other_are_no_wait() -> None:
    job = Watched(DrivenCoordinator.running("a"))
    for clock in range(80):
        job.driven.core.want_cut(job.driven.now_ms)
        job.pass_time(100)
        for index in range(2):
            job.waits.note_report(index)
        job.driven.report_all(applied=clock)
        pending = job.driven.core.snapshots.pending
        if pending is not None:
            job.driven.copy_all(pending.snapshot_id)
    job.driven.core.want_cut(job.driven.now_ms)
    job.pass_time(100)
    assert job.text() == ""


def test_workers_that_hold_a_clock_open_are_named_as_the_shards_tell() -> None:
    job = Watched(DrivenCoordinator.running("a", "b"))
    waiting_for = (Awaited("b", clock=4, step_ms=6_000),)
    for index in range(2):
        job.tell(index, waiting_for=waiting_for, waited_ms=7_000)
    job.pass_time(1_000)
    assert job.text() == "b (alive, in step 5 for 6 s), for 8 s"


def test_a_change_of_the_mode_names_who_is_behind() -> None:
    job = Watched(DrivenCoordinator.running("a", "b"))
    job.tell(0, done={key("a"): 9, key("b"): 4})
    job.tell(1, done={key("a"): 9, key("b"): 4})
    job.driven.core.set_mode(ModeTerms(Mode.ASP, 0), job.driven.now_ms)
    job.waits.note_mode(ModeTerms(Mode.ASP, 0), job.driven.now_ms)

    assert "ASP" not in job.text()
    at_once = job.waits.text(job.driven.now_ms, at_once=True)
    assert "the change to ASP" in at_once
    assert "behind are b/1 (clock 4)" in at_once

    job.pass_time(100)
    job.driven.report_all(applied=4, trailer=9)
    assert job.driven.core.mode_is(ModeTerms(Mode.ASP, 0))
    job.pass_time(100)
    assert job.waits.text(job.driven.now_ms, at_once=True) == ""


def test_a_lost_worker_is_not_named_twice() -> None:
    job = Watched(DrivenCoordinator.running("a", settings=settings(workers_min=1)))
    waiting_for = (Awaited("a", clock=4, step_ms=6_000),)
    job.lose("a")
    job.pass_time(1_000)
    for index in range(2):
        job.tell(index, waiting_for=waiting_for, waited_ms=7_000)
    assert job.text().count("a (") == 1
    assert "a (lost" in job.text()


def test_a_shard_that_waits_for_no_worker_is_named_itself() -> None:
    job = Watched(DrivenCoordinator.running("a"))
    job.tell(1, waited_ms=7_000, waiting_reason="a fence to end", applied_clock=3)
    assert "shard 1 (clock 3), which waits for a fence to end" in job.text()


def test_each_wait_has_its_own_rate(caplog: pytest.LogCaptureFixture) -> None:
    two = DrivenCoordinator(settings=settings(workers_min=2))
    two.add_worker("a")
    two.add_worker("b")
    two.add_shards()
    two.report_all()
    job = Watched(two)
    job.tell(1, waited_ms=5_000, waiting_reason="a fence to end")
    job.pass_time(1_000)
    job.lose("b")
    job.pass_time(6_000)
    clock, lost = caplog.messages
    assert "a fence to end" in clock
    assert "b (lost" in lost


def test_a_shard_is_not_named_beside_a_worker_that_explains_its_wait() -> None:
    job = Watched(DrivenCoordinator.running("a", "b"))
    waiting_for = (Awaited("b", clock=1, step_ms=6_000),)
    job.tell(0, waiting_for=waiting_for, waited_ms=7_000)
    job.tell(1, waiting_reason="clock 2 to be complete", waited_ms=6_000)
    assert job.text() == "b (alive, in step 2 for 6 s), for 7 s"


def test_who_was_taken_out_is_named_no_more(caplog: pytest.LogCaptureFixture) -> None:
    job = Watched(DrivenCoordinator.running("a", "b"))
    job.pass_time(100)
    waiting_for = (Awaited("b", clock=4, step_ms=6_000),)
    job.tell(0, waiting_for=waiting_for, waited_ms=7_000)
    job.tell(1, waiting_reason="clock 5 to be complete", waited_ms=7_000)
    job.lose("b")
    job.pass_time(1_000)
    assert job.driven.core.fence is not None
    job.driven.report_all()
    assert job.driven.core.progress.evicted_count == 1

    caplog.clear()
    job.pass_time(1_000)
    assert job.text() == ""
    assert caplog.messages == []


def test_a_failed_job_waits_for_nobody() -> None:
    job = Watched(DrivenCoordinator.running("a"))
    slot = job.driven.core.shards.slots[1]
    job.driven.core.shard_broken(slot, job.driven.now_ms)
    job.pass_time(60_000)
    assert job.driven.core.progress.failure
    assert job.text() == ""


def test_a_worker_that_validates_reads_other_than_one_that_is_lost() -> None:
    two = DrivenCoordinator.running("a", "b", settings=settings(workers_min=2))
    job = Watched(two)
    waiting_for = (Awaited("b", clock=4, step_ms=25_000),)
    job.tell(0, waiting_for=waiting_for, waited_ms=25_000, done={key("b"): 4})
    job.tell(1, done={key("b"): 4})
    assert job.text() == "b (alive, in step 5 for 25 s), for 25 s"

    job.lose("b")
    job.pass_time(300)
    assert job.text() == "b (lost 0 s ago in step 5), for 25 s"
    job.pass_time(12_000)
    assert job.text().startswith("b (lost 12 s ago in step 5), until it comes back")


def test_who_has_connected_and_not_prepared_is_named() -> None:
    job = Watched(DrivenCoordinator(settings=settings(workers_min=3)))
    job.driven.add_shards()
    job.driven.add_worker("a")
    entry = job.driven.core.register_worker(
        process_id="b", worker_id="b", address="", now_ms=0
    )
    assert "(1 of 3 have)" in job.text()
    job.driven.core.worker_watching(entry, 0)
    job.pass_time(100)
    assert job.text() == (
        "2 more workers to call prepare() (1 of 3 have; b is connected)"
    )


def test_a_worker_hears_whom_the_job_waits_for_and_for_how_long_apart() -> None:
    job = Watched(DrivenCoordinator(settings=settings(workers_min=2)))
    job.driven.add_shards()
    job.driven.add_worker("a")
    job.pass_time(310_000)
    text, waited_ms = job.waits.for_worker(job.driven.now_ms)
    assert text == "1 more worker to call prepare() (1 of 2 have)"
    assert waited_ms == pytest.approx(310_000, abs=200)


def test_a_shard_that_is_lost_is_named_with_what_follows() -> None:
    job = Watched(DrivenCoordinator.running("a"))
    waiting_for = (Awaited("a", clock=7, step_ms=6_000),)
    job.tell(0, applied_clock=7, waiting_for=waiting_for, waited_ms=6_000)
    job.tell(1, applied_clock=7)
    job.driven.core.shard_broken(job.driven.core.shards.slots[1], job.driven.now_ms)
    job.pass_time(2_000)
    assert job.text() == (
        "shard 1 (lost 2 s ago at clock 7), without which the job fails after 5 s, "
        "for 2 s"
    )


def test_who_has_the_rest_of_an_epoch_is_named_to_who_waits_for_it() -> None:
    job = Watched(DrivenCoordinator.running("a", "b"))
    shape = EpochShape(position_count=8, batch_size=4, drop_last=False)
    workers = (key("a"), key("b"))
    ledgers = job.driven.core.ledger
    for worker in workers:
        ledgers.open_epoch(worker, "train", 0, shape)
        ledger = ledgers.register_order(worker, "train", 0, 11)
    for worker in workers:
        ledger.lease(worker, workers, 1)
    entry = job.driven.core.roster.present("b")
    assert entry is not None
    entry.note_clock(4, job.driven.now_ms)
    job.driven.now_ms += 10_000

    def holders() -> str:
        return job.waits.holders(ledger, key("a"), job.driven.now_ms)

    assert holders() == "b (alive, in step 5 for 10 s)"
    since_ms = job.driven.now_ms - 10_000
    waits = JobWaits(job.driven.core, {key("a"): DataWait(ledger, since_ms)})
    assert waits.text(job.driven.now_ms) == (
        "b (alive, in step 5 for 10 s) to train the rest of epoch 0 of 'train', "
        "for 10 s"
    )
    assert waits.text(since_ms) == ""
    job.lose("b")
    job.driven.now_ms += 3_000
    assert holders() == "b (lost 3 s ago in step 5)"
