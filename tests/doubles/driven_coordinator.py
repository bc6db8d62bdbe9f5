"""A coordinator's core among shards and workers that do as told."""

from dataclasses import replace
from typing import Any, TypeVar

from psserver.coordinator.core.coordinator import CoordinatorCore
from psserver.coordinator.core.coordinator_effects import (
    Abort,
    Announce,
    CoordinatorEffect,
    Persist,
    Prepare,
)
from psserver.coordinator.core.job_progress import JobProgress
from psserver.coordinator.core.roster import WorkerEntry
from psserver.edge.coordinator_settings import CoordinatorSettings, JobPhase
from psserver.edge.cut_report import CutReport
from psserver.edge.fence_report import FenceReport, WorkerHolding
from pswire.membership import ClockChoice, FenceKind, Member, Record
from tests.doubles.core_values import TERMS

Effect = TypeVar("Effect", bound=CoordinatorEffect)


class WritingProgress(JobProgress):
    """Progress of a job whose disk takes everything at once."""

    def keep(self, what: Persist, now_ms: int, **rest: Any) -> None:  # noqa: ANN401
        super().keep(what, now_ms, **rest)
        self.written()


class WritingCore(CoordinatorCore):
    """A core whose disk takes everything at once."""

    def __init__(self, settings: CoordinatorSettings, start_count: int = 0) -> None:
        super().__init__(settings, start_count)
        self.progress.__class__ = WritingProgress


class DrivenCoordinator:
    """Keeps every effect, in order.

    Attributes:
        core: The core.
        now_ms: The time it is told.
        clip_grad_norm: Norm that its workers say.
    """

    def __init__(
        self,
        *,
        shard_count: int = 2,
        workers_min: int = 1,
        lease_ttl_ms: int = 10_000,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        self.core = WritingCore(
            settings
            or CoordinatorSettings(
                job_id="job",
                shard_count=shard_count,
                workers_min=workers_min,
                lease_ttl_ms=lease_ttl_ms,
            )
        )
        self.now_ms = 0
        self.clip_grad_norm = 0.0
        self.effects: list[CoordinatorEffect] = []

    @classmethod
    def running(
        cls,
        *names: str,
        loaders: tuple[str, ...] = (),
        settings: CoordinatorSettings | None = None,
        clip_grad_norm: float = 0.0,
    ) -> "DrivenCoordinator":
        """A job that has started with these workers, and could go on with one.

        Args:
            names: Ids of the workers.
            loaders: Loaders of each worker.
            settings: Its settings, if not as usual.
            clip_grad_norm: Norm that its workers say.
        """
        driven = cls(settings=settings)
        driven.clip_grad_norm = clip_grad_norm
        for name in names:
            driven.add_worker(name, *loaders)
        driven.add_shards()
        driven.report_all()
        assert driven.core.record is not None
        driven.forget()
        return driven

    def of(self, kind: type[Effect]) -> list[Effect]:
        """Effects of a kind, in order."""
        self.effects += self.core.progress.take_effects()
        return [each for each in self.effects if isinstance(each, kind)]

    def forget(self) -> None:
        """Looks only at what comes from here on."""
        self.of(Abort)
        self.effects.clear()

    def pass_time(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.core.tick(self.now_ms)

    # Shards

    def add_shards(self, *, but: int = 0) -> None:
        """Brings up all shards but some."""
        for index in range(self.core.settings.shard_count - but):
            slot = self.core.register_shard(
                process_id=f"shard-{index}", address=f"host:{index}", now_ms=self.now_ms
            )
            self.core.shard_watching(slot, self.now_ms)

    def break_shard(self, index: int) -> None:
        self.core.shard_broken(self.core.shards.slots[index], self.now_ms)

    def report_of(
        self,
        *,
        complete: dict[str, int] | None = None,
        applied: int = 0,
        trailer: int = 0,
        touched: int = 0,
        measured: ClockChoice | None = None,
    ) -> FenceReport:
        """What a shard of a job in BSP reports to the open fence.

        Args:
            complete: For some worker ids, clock of the last push that is complete, if
                it is not `applied`.
            applied: Highest clock that is complete.
            trailer: Highest clock of which there is a trailer, if it is above.
            touched: Highest clock of which something was applied, if it is above.
            measured: When the job clips, the open clock with its sum of squares.
        """
        fence = self.core.fence
        members = self.core.record.members if self.core.record is not None else ()
        given = complete or {}
        return FenceReport(
            fence_number=fence.number if fence is not None else 0,
            holdings=tuple(
                WorkerHolding(
                    worker=m.worker,
                    complete_sequence=_sequence(
                        m, given.get(m.worker.worker_id, applied)
                    ),
                    trailer_sequence=_sequence(m, max(trailer, applied)),
                    touched_sequence=_sequence(m, max(touched, applied)),
                )
                for m in members
            ),
            trailer_clock_max=max(trailer, touched, applied),
            touched_clock_max=max(touched, applied),
            applied_clock=applied,
            frontier=applied,
            measured=measured,
        )

    def send(self, index: int, report: FenceReport) -> None:
        """A shard's report arrives."""
        self.core.report_fence(self.core.shards.slots[index], report, self.now_ms)

    def send_all(self, report: FenceReport) -> None:
        """The same report arrives from every shard."""
        for index in range(self.core.settings.shard_count):
            self.send(index, report)

    def report(
        self,
        index: int,
        *,
        complete: dict[str, int] | None = None,
        applied: int = 0,
        trailer: int = 0,
        touched: int = 0,
    ) -> None:
        """A shard's report to the open fence; see `report_of`."""
        report = self.report_of(
            complete=complete, applied=applied, trailer=trailer, touched=touched
        )
        self.send(index, report)

    def report_all(self, *, applied: int = 0, trailer: int = 0) -> None:
        """The same report from every shard; see `report_of`."""
        assert self.core.fence is not None
        self.send_all(self.report_of(applied=applied, trailer=trailer))

    def copy_all(self, snapshot_id: int) -> None:
        """Every shard has its image."""
        for slot in self.core.shards.slots:
            self.core.report_cut(slot, CutReport(snapshot_id), self.now_ms)

    # Workers

    def register(self, name: str, *, process_id: str = "") -> WorkerEntry:
        return self.core.register_worker(
            process_id=process_id or f"process-{name}",
            worker_id=name,
            address="host:9",
            now_ms=self.now_ms,
        )

    def watch(self, entry: WorkerEntry) -> None:
        self.core.worker_watching(entry, self.now_ms)

    def join(self, entry: WorkerEntry, *loaders: str) -> None:
        self.core.join(
            entry,
            terms=replace(TERMS, clip_grad_norm=self.clip_grad_norm),
            loaders=loaders,
            now_ms=self.now_ms,
        )

    def add_worker(self, name: str, *loaders: str, process_id: str = "") -> WorkerEntry:
        """Registers, watches, and asks to join."""
        entry = self.register(name, process_id=process_id)
        self.watch(entry)
        self.join(entry, *loaders)
        return entry

    def leave(self, entry: WorkerEntry, sequence: int = 0) -> None:
        self.core.leave(entry, sequence=sequence, now_ms=self.now_ms)

    def lose(self, entry: WorkerEntry) -> None:
        """Its stream breaks and does not come back."""
        self.core.worker_broken(entry, self.now_ms)
        self.pass_time(self.core.settings.reconnect_grace_ms)

    # What it decided

    @property
    def record(self) -> Record:
        assert self.core.record is not None
        return self.core.record

    @property
    def bases(self) -> dict[str, int]:
        """Base clock of each member."""
        return {str(m.worker): m.base_clock for m in self.record.members}

    def phase(self) -> JobPhase:
        return self.core.phase

    def fence_kinds(self) -> list[FenceKind]:
        return [each.kind for each in self.of(Prepare)]

    def announced(self) -> list[Record]:
        """Records that were announced, each after it was made durable."""
        kept: list[Record] = []
        told = []
        self.of(Announce)
        for effect in self.effects:
            if isinstance(effect, Persist) and effect.record is not None:
                kept.append(effect.record)
            elif isinstance(effect, Announce):
                assert effect.record in kept
                told.append(effect.record)
        return told


def _sequence(member: Member, clock: int) -> int:
    """The push of a clock; what was pushed before its base is done."""
    return max(member.base_sequence, member.sequence_of(clock))
