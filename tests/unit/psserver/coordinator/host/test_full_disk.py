"""What anybody is told is on the disk, whenever that takes nothing for a while."""

import asyncio
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from psserver.coordinator.core.coordinator_effects import Announce
from psserver.coordinator.core.roster import WorkerEntry
from psserver.coordinator.core.state_writes import PROBE_MS
from psserver.coordinator.host.coordinator_host import CoordinatorHost
from psserver.coordinator.rpc.public_control import PublicControl
from psserver.coordinator.storage.job_store import JobStore
from psserver.edge.coordinator_settings import CoordinatorSettings
from psserver.edge.monotonic import now_ms
from pswire.leased_data import DataReport, EpochShape, RecordedSplit
from pswire.limits import PROTOCOL_VERSION
from pswire.membership import Mode, ModeTerms, WorkerState
from pswire.reasons import ErrorReason, Refusal
from pswire.v1 import coordinator_service_pb2 as messages
from tests.doubles.core_values import TERMS, key
from tests.doubles.driven_coordinator import DrivenCoordinator
from tests.doubles.full_disk import full_disk

if TYPE_CHECKING:
    from psserver.edge.guard import Context

USUAL = (ErrorReason.STATE_NOT_WRITTEN, ErrorReason.WORKER_ID_TAKEN)

SETTINGS = CoordinatorSettings(job_id="job", shard_count=2)
SHAPE = EpochShape(position_count=64, batch_size=2, drop_last=False)


class Job:
    """A coordinator over its real file, and what its shards and workers ask.

    Attributes:
        store: The file.
        host: The coordinator of the present start.
        members: Those that ask for data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.members: list[WorkerEntry] = []
        self._ahead_ms = 0
        self._start()

    def _start(self) -> None:
        self.store = JobStore(self._folder)
        self.host = CoordinatorHost(SETTINGS, self.store)
        for index in range(SETTINGS.shard_count):
            slot = self.host.register_shard(
                process_id=f"s{index}", address=f"host:{index}"
            )
            self.host.open_shard_watch(slot)

    def restart(self) -> None:
        """The process is killed, and another one goes on."""
        self.store.__exit__(None, None, None)
        self._start()
        roster = self.host.core.roster
        known = roster.in_state(*WorkerState)
        self.members = [e for e in known if e.state is not WorkerState.LEFT]
        for entry in self.members:
            self.host.open_worker_watch(entry)

    def register(self, name: str, process_id: str = "") -> WorkerEntry:
        return self.host.register_worker(
            process_id=process_id or f"process-{name}", worker_id=name, address=""
        )

    def join(self, entry: WorkerEntry) -> None:
        self.host.open_worker_watch(entry)
        self.host.core.join(
            entry,
            terms=TERMS,
            loaders=("loader",),
            now_ms=now_ms(),
        )
        self.host.pump_for_caller()

    def begin(self, *names: str) -> None:
        """A job with these members, on a disk that has room."""
        for name in names:
            entry = self.register(name)
            self.join(entry)
            self.members.append(entry)
            self.report()
        assert self.host.core.record is not None
        assert len(self.host.core.record.members) == len(names)

    def report(self) -> None:
        """All shards answer the open fence, if there is one."""
        fence = self.host.core.fence
        if fence is None:
            return
        driven = DrivenCoordinator(shard_count=SETTINGS.shard_count)
        driven.core = self.host.core  # type: ignore[assignment]  # for its reports
        report = driven.report_of()
        for slot in self.host.core.shards.slots:
            self.host.take_report(slot, report)

    def leave(self, entry: WorkerEntry) -> None:
        """It asks to leave, and does not wait for the record."""
        self.host.core.leave(entry, sequence=0, now_ms=now_ms())
        self.host.pump_for_caller()

    def probe(self) -> None:
        """The time comes at which the disk is tried again."""
        self._ahead_ms += PROBE_MS
        self.host.core.tick(now_ms() + self._ahead_ms)
        self.host.pump()

    def check(self) -> None:
        """Memory is as the disk: nobody can be told more."""
        core = self.host.core
        stored = self.store.load()
        assert stored is not None
        assert stored.record == core.record
        assert stored.incarnations == core.roster.incarnations
        assert [(s.process_id, s.incarnation) for s in stored.shards] == [
            (s.process_id, s.incarnation) for s in core.shards.slots
        ]
        assert stored.terms == core.model.terms
        assert self.store.load_epochs() == core.ledger.epochs()
        assert self.store.load_splits() == self.host.data.splits.all()
        assert not core.writes.is_open


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def split(name: str) -> RecordedSplit:
    return RecordedSplit(
        name=name, recipe="{}", digest="0" * 64, item_count=4, recorder="a"
    )


def refused(call: Callable[[], object]) -> None:
    """The call is refused since the disk is full, with what to do."""
    with full_disk(), pytest.raises(Refusal) as caught:
        call()
    assert caught.value.reason is ErrorReason.STATE_NOT_WRITTEN
    assert "job.sqlite" in caught.value.message
    assert "make room" in caught.value.text


def test_a_worker_that_could_not_be_kept_is_not_known(job: Job) -> None:
    refused(lambda: job.register("a"))
    job.check()
    assert job.register("a").worker == key("a/1")
    job.check()


def test_who_asks_again_is_kept_then(job: Job) -> None:
    """The same process, which is answered without a write once it is kept."""
    refused(lambda: job.register("a"))
    refused(lambda: job.register("a"))
    job.register("a")
    job.restart()
    assert job.register("a").worker == key("a/1")


def test_a_shard_that_could_not_be_kept_has_no_place(tmp_path: Path) -> None:
    with JobStore(tmp_path) as store:
        host = CoordinatorHost(SETTINGS, store)

        def register() -> int:
            return host.register_shard(process_id="s", address="host:1").incarnation

        refused(register)
        assert host.core.shards.slots[0].process_id == ""
        assert register() == 1
        stored = store.load()
        assert stored is not None
        assert [shard.process_id for shard in stored.shards] == ["s"]


def test_what_the_job_trains_is_told_only_when_it_is_kept(job: Job) -> None:
    entry = job.register("a")
    refused(lambda: job.join(entry))
    assert job.host.core.model.schema is None
    assert job.host.core.fence is None
    job.check()
    job.join(entry)
    job.report()
    job.check()
    assert job.host.core.record is not None


def test_a_split_that_could_not_be_kept_is_free(job: Job) -> None:
    refused(lambda: job.host.data.record_split(split("folds")))
    assert job.host.data.splits.all() == ()
    job.host.data.record_split(split("folds"))
    job.check()


async def test_a_lease_that_could_not_be_kept_is_dealt_again(job: Job) -> None:
    job.begin("a", "b")
    a = job.members[0]
    data = job.host.data
    refused(lambda: data.open_epoch(a, "loader", 0, SHAPE, b"", DataReport()))
    job.check()
    data.open_epoch(a, "loader", 0, SHAPE, b"", DataReport())
    refused(lambda: data.take_report(a, "loader", 0, 7, DataReport()))
    ledger = data.take_report(a, "loader", 0, 7, DataReport())
    with full_disk(), pytest.raises(Refusal, match="can't write"):
        await data.lease(a, ledger, count_max=2, wait=True)
    job.check()
    first = await data.lease(a, ledger, count_max=2, wait=True)
    assert [piece.start for piece in first] == [0, 4]
    report = DataReport(consumed=tuple(first))
    refused(lambda: data.take_report(a, "loader", 0, 7, report))
    assert ledger.consumed_count == 0
    data.take_report(a, "loader", 0, 7, report)
    assert ledger.consumed_count == 4
    job.check()


async def test_who_leaves_is_told_and_stays_a_member(job: Job) -> None:
    job.begin("a", "b")
    a = job.members[0]
    data = job.host.data
    data.open_epoch(a, "loader", 0, SHAPE, b"", DataReport())
    ledger = data.take_report(a, "loader", 0, 7, DataReport())
    leased = tuple(await data.lease(a, ledger, count_max=1, wait=False))
    report = DataReport(consumed=leased)
    with full_disk(), pytest.raises(Refusal, match="can't write"):
        await job.host.leave(a, 0, report)
    assert a.state is WorkerState.MEMBER
    leaving = asyncio.create_task(job.host.leave(a, 0, report))
    await asyncio.sleep(0)
    job.report()
    await leaving
    assert a.state is WorkerState.LEFT
    job.check()


@pytest.mark.parametrize("change", ["mode", "departure"])
def test_a_record_that_can_not_be_written_is_no_record(job: Job, change: str) -> None:
    """Training goes on, and what was wanted comes as soon as there is room."""
    job.begin("a", "b")
    before = job.host.core.record
    queue = job.host.open_shard_watch(job.host.core.shards.slots[0])
    if change == "mode":
        job.host.core.set_mode(ModeTerms(Mode.ASP, 0), now_ms())
    else:
        job.leave(job.members[0])
    job.host.pump()
    with full_disk():
        job.report()
        assert job.host.core.fence is None, "shards stand still for nothing"
        assert job.host.core.record is before
        job.probe()
        assert job.host.core.fence is None
        job.check()
    assert "room on the coordinator's disk" in job.host.waits.text(now_ms())
    assert "room on the coordinator's disk" in job.host.waits.disk_text
    job.probe()
    assert not job.host.waits.disk_text
    assert job.host.waits.text(now_ms(), at_once=True).count("disk") == 0
    job.report()
    job.check()
    told = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [e.record for e in told if isinstance(e, Announce)] == [job.host.core.record]
    assert job.host.core.record is not before


def test_the_first_values_stay_staged_until_there_is_room(job: Job) -> None:
    entry = job.register("a")
    job.join(entry)
    with full_disk():
        job.report()
        fence = job.host.core.fence
        job.probe()
    assert fence is not None
    assert job.host.core.fence is fence
    assert job.host.core.record is None
    job.probe()
    assert job.host.core.record is not None
    job.check()


async def test_who_asks_for_a_mode_and_the_status_name_the_disk(job: Job) -> None:
    job.begin("a")
    with full_disk():
        asked = asyncio.create_task(job.host.set_mode(ModeTerms(Mode.ASP, 0), 0.05))
        await asyncio.sleep(0)
        job.report()
        with pytest.raises(Refusal) as caught:
            await asked
        request = messages.GetStatusRequest(protocol_version=PROTOCOL_VERSION)
        control = PublicControl(job.host)
        status = await control.get_status(request, cast("Context", None))
    assert "room on the coordinator's disk" in caught.value.message
    assert "room on the coordinator's disk" in status.waiting_for


class Schedule:
    """What a job of many changes does, drawn from a seed."""

    def __init__(self, job: Job, rng: random.Random) -> None:
        self._job = job
        self._rng = rng
        self._count = 0

    async def step(self) -> None:
        """Something is asked, on a disk with or without room."""
        self._count += 1
        asked = self._rng.choice(
            [
                *(self._register, self._split, self._data, self._data, self._data),
                *(self._mode, self._leave, self._tell_report, self._tick),
            ]
        )
        is_full = self._rng.random() < 0.4
        with full_disk() if is_full else nullcontext():
            try:
                await asked()
            except Refusal as refusal:
                if refusal.reason not in USUAL:
                    raise
        self._job.check()
        if self._rng.random() < 0.05:
            self._job.restart()
            self._job.check()

    async def _register(self) -> None:
        self._job.register(f"n{self._rng.randint(0, 3)}", f"p{self._rng.randint(0, 3)}")

    async def _split(self) -> None:
        self._job.host.data.record_split(split(f"split {self._rng.randint(0, 9)}"))

    async def _data(self) -> None:
        record = self._job.host.core.record
        assert record is not None
        present = [
            entry
            for entry in self._job.members
            if record.member_of(entry.worker) and entry.state is WorkerState.MEMBER
        ]
        if not present:
            return
        entry, epoch = self._rng.choice(present), self._rng.randint(0, 2)
        data = self._job.host.data
        data.open_epoch(entry, "loader", epoch, SHAPE, b"", DataReport())
        ledger = data.take_report(entry, "loader", epoch, 7, DataReport())
        leased = await data.lease(entry, ledger, count_max=3, wait=False)
        used = DataReport(
            consumed=tuple(leased[:1]),
            skipped=tuple(leased[1:2]),
            dropped=tuple(leased[2:3]),
        )
        data.take_report(entry, "loader", epoch, 7, used)

    async def _mode(self) -> None:
        mode = self._rng.choice([Mode.BSP, Mode.ASP])
        self._job.host.core.set_mode(ModeTerms(mode, 0), now_ms())
        self._job.host.pump()

    async def _leave(self) -> None:
        if len(self._job.members) > 1 and self._rng.random() < 0.2:
            self._job.leave(self._job.members.pop())

    async def _tell_report(self) -> None:
        self._job.report()

    async def _tick(self) -> None:
        self._job.probe()


@pytest.mark.parametrize("seed", range(12))
async def test_memory_is_as_the_disk_whatever_fails(tmp_path: Path, seed: int) -> None:
    job = Job(tmp_path)
    job.begin("a", "b", "c")
    schedule = Schedule(job, random.Random(seed))
    for _ in range(60):
        await schedule.step()
