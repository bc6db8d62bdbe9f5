"""A shard's core with an owner that does as told, step by step."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TypeVar

from psserver.edge.fence_report import FenceReport
from psserver.shard.core.effects import (
    ApplyChunk,
    CopyImage,
    Finish,
    ShardEffect,
    Staged,
)
from psserver.shard.core.push import PushEntry, PushId, Reply, Trailer
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_state import ShardRules
from pswire.leased_data import DataRange
from pswire.membership import (
    Departure,
    FenceKind,
    Mode,
    Outcome,
    Record,
    StepAtomicity,
    WorkerKey,
)
from tests.doubles.core_values import chunk, key, push_id, record, trailer

TWO_PHASE = ShardRules(step_atomicity=StepAtomicity.CLOCK)

Effect = TypeVar("Effect", bound=ShardEffect)


class DrivenShard:
    """Keeps every effect; carries out none unless told.

    Attributes:
        core: The core.
        effects: All effects so far.
    """

    def __init__(
        self,
        bases: dict[str, int],
        chunk_indexes: Iterable[int],
        *,
        mode: Mode = Mode.BSP,
        staleness_bound: int = 0,
        rules: ShardRules | None = None,
    ) -> None:
        self.core = ShardCore(list(chunk_indexes), rules)
        self.effects: list[ShardEffect] = []
        self._applied_count = 0
        if bases:
            self.install(record(bases, mode=mode, staleness_bound=staleness_bound))
            self.effects.clear()

    def of(self, kind: type[Effect]) -> list[Effect]:
        """Effects of a kind, in order."""
        self.effects += self.core.take_effects()
        return [each for each in self.effects if isinstance(each, kind)]

    def forget(self) -> None:
        """Looks only at what comes from here on."""
        self.of(Finish)
        self.effects.clear()
        self._applied_count = 0

    # Workers

    def clock_of(self, push: PushId) -> int:
        member = self.core.clocks.member_of(push.worker)
        departed = self.core.clocks.departure_of(push.worker)
        if member is None and departed is not None:
            member = departed.member
        return member.clock_of(push.sequence) if member else push.sequence

    def open(self, push: PushId, now_ms: int = 0) -> PushEntry:
        record = self.core.clocks.record
        entry = self.core.open_push(
            push,
            self.clock_of(push),
            now_ms,
            generation=record.generation if record is not None else 0,
        )
        assert entry is not None
        return entry

    def send_trailer(self, push: PushId, what: Trailer) -> None:
        self.core.add_trailer(push, self.open(push), what)

    def send_chunk(self, push: PushId, index: int, payload: object = None) -> None:
        what = chunk(f"{push} {index}" if payload is None else payload)
        self.core.add_chunk(push, self.open(push), index, what)

    def push(
        self,
        name: str,
        sequence: int = 1,
        *,
        chunks: Iterable[int] = (),
        weight: float = 1.0,
        optimizer: str = "optimizer",
        rate: float = 0.1,
        finite: bool = True,
    ) -> PushId:
        """The whole push, trailer first."""
        push = push_id(name, sequence)
        indexes = list(chunks)
        what = trailer(
            indexes, weight=weight, optimizer=optimizer, rate=rate, finite=finite
        )
        self.send_trailer(push, what)
        for index in indexes:
            self.send_chunk(push, index)
        return push

    def send_ranges(self, name: str, sequence: int, *, start: int) -> None:
        """A push of weight 0 that brings a batch of 8 of a first epoch."""
        what = replace(
            trailer(weight=0.0), ranges=(DataRange("data", 0, start, start + 8),)
        )
        self.send_trailer(push_id(name, sequence), what)

    # The owner

    def apply_all(self) -> list[ApplyChunk]:
        """Carries out every order to apply that is not, also those that follow."""
        done: list[ApplyChunk] = []
        while orders := self.of(ApplyChunk)[self._applied_count :]:
            for order in orders:
                self._applied_count += 1
                self.core.chunk_applied(order.chunk_index)
            done += orders
        return done

    def step(self, name: str, sequence: int, chunks: Iterable[int]) -> None:
        """A push, applied if the clock is complete."""
        self.push(name, sequence, chunks=chunks)
        self.apply_all()

    def replies(self) -> dict[PushId, Reply]:
        """The newest answer to each push."""
        return {each.push: each.reply for each in self.of(Finish)}

    def finishes(self) -> list[Finish]:
        return self.of(Finish)

    def outcomes(self) -> dict[str, Outcome]:
        """The newest answer to each worker."""
        return {
            each.push.worker.worker_id: each.reply.outcome for each in self.of(Finish)
        }

    def answered(self) -> list[tuple[str, int]]:
        """Pushes that were answered, in order."""
        return [(e.push.worker.worker_id, e.push.sequence) for e in self.of(Finish)]

    def applied(self) -> list[tuple[str, int, int]]:
        """In SSP and ASP, whose updates were ordered: worker, clock and chunk."""
        return [
            (order.pusher.worker_id, order.clock, order.chunk_index)
            for order in self.of(ApplyChunk)
            if order.pusher is not None
        ]

    def staged(self) -> list[Staged]:
        return self.of(Staged)

    def reports(self) -> list[FenceReport]:
        return self.of(FenceReport)

    def copies(self) -> list[CopyImage]:
        return self.of(CopyImage)

    def image_orders(self) -> list[ApplyChunk | CopyImage]:
        """Updates and images, in order: an image has the updates before it."""
        self.effects += self.core.take_effects()
        return [e for e in self.effects if isinstance(e, ApplyChunk | CopyImage)]

    # The coordinator

    def install(self, what: Record) -> None:
        self.core.install_record(what)
        self.effects += self.core.take_effects()

    def depart(
        self,
        bases: dict[str, int],
        *gone: Departure,
        steps: int = 0,
    ) -> None:
        """A record without workers that have ended.

        Args:
            bases: Those that stay, with their base clocks.
            gone: How the others ended.
            steps: Of all that have ended, those that count.
        """
        known = self.core.clocks.record
        assert known is not None
        self.install(
            record(
                bases,
                generation=known.generation + 1,
                mode=known.mode,
                staleness_bound=known.staleness_bound,
                departures=gone,
                departed_step_count=steps,
            )
        )

    def freeze(
        self,
        number: int,
        kind: FenceKind = FenceKind.MEMBERSHIP,
        seeder: str = "",
        *,
        evicting: Collection[str] = (),
    ) -> None:
        who: WorkerKey | None = key(seeder) if seeder else None
        self.core.prepare_fence(number, kind, who, list(map(key, evicting)))

    def change(
        self,
        mode: Mode,
        mode_clock: int,
        *,
        bases: dict[str, int],
        sequences: dict[str, int] | None = None,
        bound: int = 0,
        departures: tuple[Departure, ...] = (),
        steps: int = 0,
    ) -> None:
        """A record of a mode or of members, after this shard has reported."""
        known = self.core.clocks.record
        assert known is not None
        number = known.generation + 1
        self.freeze(number)
        assert self.reports()[-1].fence_number == number
        self.install(
            record(
                bases,
                generation=number,
                mode=mode,
                staleness_bound=bound,
                mode_clock=mode_clock,
                base_sequences=sequences,
                departures=departures,
                departed_step_count=steps,
            )
        )

    def clock_orders(self) -> list[tuple[int, str]]:
        """Clocks of BSP that were applied, with the ids of those that contributed."""
        return [
            (order.clock, "".join(part.worker_id for part in order.contributions))
            for order in self.of(ApplyChunk)
            if order.pusher is None
        ]


# Shards at the start of a job


def bsp(*names: str) -> DrivenShard:
    return DrivenShard(dict.fromkeys(names, 0), [0])


def asp(*names: str, chunks: tuple[int, ...] = (0,)) -> DrivenShard:
    return DrivenShard(dict.fromkeys(names, 0), chunks, mode=Mode.ASP)


def ssp(bound: int, *names: str, chunks: tuple[int, ...] = (0,)) -> DrivenShard:
    return DrivenShard(
        dict.fromkeys(names, 0), chunks, mode=Mode.SSP, staleness_bound=bound
    )


def far_apart() -> DrivenShard:
    """In ASP, `a` at clock 5 and `b` at clock 1, answered."""
    shard = asp("a", "b")
    for sequence in range(1, 6):
        shard.step("a", sequence, [0])
    shard.step("b", 1, [0])
    return shard
