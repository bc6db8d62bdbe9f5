"""Who is taken out for a shard that gives one worker no answer, and who is not."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from psserver.coordinator.core.coordinator_effects import Abort, OrderSeed, WorkerCutOff
from psserver.coordinator.core.reach import CutOff, Reach
from psserver.coordinator.core.shard_map import ShardMap, ShardStanding
from psserver.edge.coordinator_settings import CoordinatorSettings
from pswire.membership import (
    FenceKind,
    LossPolicy,
    StepAtomicity,
    WorkerKey,
    WorkerState,
)
from pswire.reasons import ErrorReason
from tests.doubles.core_values import key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.refusals import refused

LEASE_MS = 10_000
MARGIN_MS = LEASE_MS // 4
A, B, C = key("a"), key("b"), key("c")
MEMBERS = (A, B, C)


def shard_map() -> ShardMap:
    shards = ShardMap(2)
    for slot in shards.slots:
        slot.is_watching = True
    return shards


class Job:
    """What workers tell, at times in ms."""

    def __init__(self) -> None:
        self.shards = shard_map()
        self.reach = Reach(LEASE_MS)
        self.now_ms = 100_000
        self.told: dict[tuple[str, int], int] = {}

    def tell(self, name: str, silent_ms: int, *, shard: int = 1) -> None:
        self.told[name, shard] = silent_ms
        slots = self.shards.slots
        self.reach.note(key(name), {shard: silent_ms}, slots, self.now_ms)

    def done(self, counts: Mapping[str, int]) -> None:
        done = {key(name): count for name, count in counts.items()}
        self.shards.slots[1].standing = ShardStanding(done=done)

    def found(self) -> dict[WorkerKey, CutOff]:
        return self.reach.cut_off(MEMBERS, self.shards.slots, self.now_ms)

    def cut_off(self) -> dict[str, tuple[int, str]]:
        """Who is, when all tell the same again a little later."""
        told = dict(self.told)
        assert self.found() == {}
        self.now_ms += MARGIN_MS
        for (name, shard), silent_ms in told.items():
            is_silent = silent_ms >= LEASE_MS
            self.tell(name, silent_ms + MARGIN_MS * is_silent, shard=shard)
        return {
            worker.worker_id: (cut.shard_index, cut.other.worker_id)
            for worker, cut in self.found().items()
        }


def test_who_gets_no_answer_that_another_gets_is_cut_off() -> None:
    job = Job()
    job.tell("a", LEASE_MS)
    assert job.found() == {}
    job.tell("b", 100)
    assert job.found() == {}
    job.now_ms += MARGIN_MS
    job.tell("a", LEASE_MS + MARGIN_MS)

    assert job.found() == {A: CutOff(1, B, LEASE_MS + MARGIN_MS)}


def test_who_is_answered_a_little_later_than_others_is_not_cut_off() -> None:
    """Nobody was, as of a shard that stood still, and then all are again."""
    job = Job()
    job.tell("a", LEASE_MS)
    job.tell("b", LEASE_MS)
    job.now_ms += MARGIN_MS
    job.tell("b", 0)
    assert job.found() == {}
    job.now_ms += MARGIN_MS - 1
    job.tell("a", LEASE_MS + 2 * MARGIN_MS - 1)
    assert job.found() == {}
    job.now_ms += MARGIN_MS
    job.tell("a", 0)

    assert job.found() == {}


@pytest.mark.parametrize(
    ("mine_ms", "theirs_ms"),
    [
        (LEASE_MS - 1, 0),  # not for long yet
        (LEASE_MS, LEASE_MS),  # nobody reaches it
        (LEASE_MS, LEASE_MS - 1),  # nor for long
        (LEASE_MS, LEASE_MS - LEASE_MS // 4 + 1),  # their connections broke together
    ],
)
def test_nobody_is_cut_off_before_it_is_known_where_the_fault_is(
    mine_ms: int, theirs_ms: int
) -> None:
    job = Job()
    job.tell("a", mine_ms)
    job.tell("b", theirs_ms)

    assert job.cut_off() == {}


def test_a_worker_that_pushes_on_and_asks_nothing_reaches_the_shard() -> None:
    job = Job()
    job.done({"a": 4, "b": 7})
    job.tell("a", LEASE_MS)
    job.done({"a": 4, "b": 8})
    assert job.found() == {}  # that push may have been there before

    job.done({"a": 4, "b": 9})

    assert job.cut_off() == {"a": (1, "b")}


def test_pushes_count_from_when_the_silence_was_told_first() -> None:
    job = Job()
    job.done({"b": 5})
    job.tell("a", 10)
    job.done({"b": 90})
    job.tell("a", LEASE_MS)
    assert job.found() == {}

    job.now_ms += LEASE_MS // 2
    job.done({"b": 92})
    job.tell("a", LEASE_MS + LEASE_MS // 2)

    assert job.cut_off() == {"a": (1, "b")}


def test_a_shard_that_answers_again_ends_it() -> None:
    job = Job()
    job.tell("a", LEASE_MS)
    job.tell("b", 0)
    job.tell("a", 0)

    assert job.cut_off() == {}


def test_what_is_not_told_again_is_forgotten() -> None:
    job = Job()
    job.tell("a", LEASE_MS)
    job.now_ms += LEASE_MS
    assert job.reach.unreached(A, job.now_ms) == [1]
    job.now_ms += 1
    job.tell("b", 0)

    assert job.found() == {}
    assert job.reach.unreached(A, job.now_ms) == []


def test_of_a_shard_that_is_away_nothing_follows_for_workers() -> None:
    job = Job()
    job.shards.slots[1].is_watching = False
    job.tell("a", LEASE_MS)
    job.tell("b", 0)

    assert job.cut_off() == {}


def test_several_are_cut_off_at_once_and_each_from_its_shard() -> None:
    job = Job()
    job.tell("a", LEASE_MS, shard=0)
    job.tell("b", LEASE_MS, shard=1)
    job.tell("c", 0, shard=0)
    job.tell("c", 0, shard=1)

    assert job.cut_off() == {"a": (0, "c"), "b": (1, "c")}


def test_who_asks_to_join_has_heard_of_every_shard() -> None:
    job = Job()
    job.tell("a", LEASE_MS)
    job.tell("b", 0)
    assert job.found() == {}
    job.now_ms += MARGIN_MS
    job.tell("a", LEASE_MS + MARGIN_MS)

    job.reach.admit(A)

    assert job.found() == {}
    assert job.reach.unreached(A, job.now_ms) == []


def test_only_members_count() -> None:
    job = Job()
    job.tell("a", LEASE_MS)
    job.tell("other", 0)
    assert job.found() == {}
    job.tell("other", LEASE_MS)
    job.tell("b", 0)

    assert job.cut_off() == {"a": (1, "b")}


# The coordinator


SETTINGS = CoordinatorSettings(job_id="job", shard_count=2)


def running(*names: str, workers_min: int = 1, **others: object) -> DrivenCoordinator:
    settings = replace(SETTINGS, workers_min=workers_min, **others)  # type: ignore[arg-type]
    return DrivenCoordinator.running(*names, settings=settings)


def tell(job: DrivenCoordinator, name: str, silent_ms: int, shard: int = 1) -> None:
    entry = job.core.roster.entry(key(name))
    job.core.report_silence(entry, {shard: silent_ms}, job.now_ms)


def cut_off_a(job: DrivenCoordinator) -> None:
    """All but `a` reach shard 1, and a little later, too."""
    for silent_ms in (LEASE_MS, LEASE_MS + MARGIN_MS):
        tell(job, "b", 0)
        tell(job, "a", silent_ms)
        if silent_ms == LEASE_MS:
            job.pass_time(MARGIN_MS)


def test_who_is_cut_off_is_taken_out_with_the_reason_and_may_come_back() -> None:
    job = running("a", "b")
    cut_off_a(job)

    (cut,) = job.of(WorkerCutOff)
    assert (cut.worker, cut.silent_ms) == (A, LEASE_MS + MARGIN_MS)
    assert cut.reason == "can't reach shard 1 at host:1, which b reaches"
    assert job.core.fence is not None
    job.report_all(applied=3)
    assert job.bases.keys() == {"b/1"}
    assert job.core.waiting_for() == ""

    job.add_worker("a", process_id="again")
    job.report_all(applied=4)
    assert job.bases.keys() == {"b/1", "a/2"}


def test_who_has_waited_for_a_shard_to_join_is_not_taken_out_as_it_does() -> None:
    job = running("b")
    entry = job.register("a")
    job.watch(entry)
    for silent_ms in (LEASE_MS, LEASE_MS + MARGIN_MS):
        tell(job, "b", 0)
        tell(job, "a", silent_ms)
        job.pass_time(MARGIN_MS)
    job.join(entry)
    job.report_all(applied=1)
    assert "a/1" in job.bases
    assert job.core.waiting_for() == ""  # nor is a shard said to be silent for it

    tell(job, "b", 0)
    job.pass_time(MARGIN_MS)

    assert not job.of(WorkerCutOff)
    assert job.core.fence is None


def test_the_reason_is_said_once() -> None:
    job = running("a", "b", workers_min=2)
    for _ in range(5):
        tell(job, "b", 0)
        tell(job, "a", LEASE_MS)
        job.pass_time(LEASE_MS // 2)

    assert len(job.of(WorkerCutOff)) == 1


def test_below_the_floor_nobody_is_taken_out_and_the_job_says_why_it_waits() -> None:
    job = running("a", "b", workers_min=2)
    cut_off_a(job)
    job.pass_time(1_000)

    assert job.core.fence is None
    assert job.core.waiting_for() == (
        "a, which can't reach shard 1 at host:1, which b reaches, until it can, or "
        "another worker joins"
    )
    job.add_worker("c")
    assert job.core.fence is not None
    job.report_all()
    assert job.bases.keys() == {"b/1", "c/1"}


def test_with_a_place_that_is_kept_the_job_waits_for_it() -> None:
    job = running(
        "a",
        "b",
        worker_loss_policy=LossPolicy.WAIT,
        step_atomicity=StepAtomicity.CLOCK,
    )
    cut_off_a(job)
    job.pass_time(1_000)

    assert job.core.fence is None
    assert job.core.waiting_for() == (
        "a, which can't reach shard 1 at host:1, which b reaches, until it can"
    )


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_shard_that_no_worker_reaches_is_what_the_job_waits_for(names: str) -> None:
    job = running(*names)
    for name in names:
        tell(job, name, LEASE_MS)
    job.pass_time(LEASE_MS // 2)

    assert job.core.fence is None
    assert not job.core.progress.failure
    assert job.core.waiting_for() == (
        f"shard 1 at host:1, which gives {' and '.join(names)} no answer"
    )


def test_a_shard_that_answers_while_the_fence_is_open_ends_it() -> None:
    job = running("a", "b")
    cut_off_a(job)
    assert job.core.fence is not None
    job.report(0, applied=3)
    tell(job, "a", 0)
    job.report(1, applied=3)

    assert len(job.of(Abort)) == 1
    assert job.bases.keys() == {"a/1", "b/1"}
    assert job.core.fence is None


def test_a_shard_that_workers_reach_and_the_coordinator_not_ends_the_job() -> None:
    job = running("a", "b")
    tell(job, "b", 0)
    job.break_shard(1)
    tell(job, "a", LEASE_MS)
    assert job.core.fence is None
    job.pass_time(LEASE_MS // 2)

    assert job.core.progress.failure == "shard 1 at host:1 was lost"
    assert job.core.roster.entry(A).state is WorkerState.MEMBER


def test_silence_of_a_shard_that_the_job_has_not_is_refused() -> None:
    job = running("a", "b")

    with refused(ErrorReason.MALFORMED_MESSAGE, "the job has 2 shards"):
        tell(job, "a", LEASE_MS, shard=2)


def test_who_is_cut_off_gives_its_place_to_nobody_before_the_record() -> None:
    job = running("a", "b")
    cut_off_a(job)

    assert job.fence_kinds() == [FenceKind.MEMBERSHIP]
    with refused(ErrorReason.WORKER_ID_TAKEN):
        job.register("a", process_id="another")


# Before the start


def starting(*names: str, workers_min: int) -> DrivenCoordinator:
    """All have asked to join, and the first one is to write the first values."""
    settings = replace(SETTINGS, workers_min=workers_min)
    job = DrivenCoordinator(settings=settings)
    job.add_shards()
    for name in names:
        job.add_worker(name)
    return job


def seeders(job: DrivenCoordinator) -> list[str]:
    return [order.worker.worker_id for order in job.of(OrderSeed)]


def test_another_worker_seeds_for_one_that_cannot_reach_a_shard() -> None:
    job = starting("a", "b", workers_min=1)
    assert seeders(job) == ["a"]
    cut_off_a(job)

    assert [abort.reason for abort in job.of(Abort)] == [
        "a/1 can't reach shard 1 at host:1, which b reaches"
    ]
    assert seeders(job) == ["a", "b"]
    (cut,) = job.of(WorkerCutOff)
    assert cut.is_joining
    job.report_all()
    assert job.bases.keys() == {"b/1"}
    assert job.core.waiting_for() == ""


def test_who_could_not_seed_is_taken_in_once_it_reaches_the_shard() -> None:
    job = starting("a", "b", workers_min=1)
    cut_off_a(job)
    job.report_all()
    job.pass_time(MARGIN_MS)
    assert job.core.fence is None
    tell(job, "a", 0)

    job.report_all(applied=3)
    assert job.bases.keys() == {"a/1", "b/1"}


def test_a_start_below_the_floor_waits_for_who_cannot_reach_a_shard() -> None:
    job = starting("a", "b", workers_min=2)
    cut_off_a(job)

    assert job.core.fence is None
    assert job.core.waiting_for() == (
        "1 more worker to call prepare() (1 of 2 have), a, which can't reach shard 1 "
        "at host:1, which b reaches, until it can"
    )
    tell(job, "a", 0)
    assert seeders(job) == ["a", "a"]
    job.report_all()
    assert job.bases.keys() == {"a/1", "b/1"}


def test_a_seeder_that_is_alone_is_waited_for_with_the_shard() -> None:
    job = starting("a", workers_min=1)
    for _ in range(3):
        tell(job, "a", LEASE_MS)
        job.pass_time(MARGIN_MS)

    assert seeders(job) == ["a"]
    assert job.core.waiting_for() == (
        "the first values from a, shard 1 at host:1, which gives a no answer"
    )


def test_a_shard_that_nobody_reaches_is_no_reason_to_seed_again() -> None:
    job = starting("a", "b", workers_min=2)
    for _ in range(3):
        tell(job, "a", LEASE_MS)
        tell(job, "b", LEASE_MS)
        job.pass_time(MARGIN_MS)

    assert seeders(job) == ["a"]
    assert job.core.waiting_for() == (
        "the first values from a, shard 1 at host:1, which gives a and b no answer"
    )
