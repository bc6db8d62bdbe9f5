"""A shard of the simulated world: the real core, with values that count pushes.

The gradient of a push adds one to its own counter and nothing else, so that values
tell exactly which pushes are in them, and how often.
"""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_report import FenceReport
from psserver.shard.core.effects import (
    ApplyChunk,
    ClockClosed,
    ContributionAwaited,
    CopyImage,
    Finish,
    LoadState,
    MeasureClock,
    PushDone,
    RefusePush,
    ShardEffect,
    Staged,
    WakeAt,
)
from psserver.shard.core.push import PushId, Reply, StagedChunk, Trailer
from psserver.shard.core.quorum import Merge
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_state import ShardRules
from psserver.shard.host.hosted_members import HostedMembers, check_next
from psserver.shard.tensors.chunk_image import PendingImage
from pswire.checkpoint.manifest import FilePart
from pswire.membership import ClockChoice, Outcome, Record, WorkerKey
from pswire.reasons import Refusal
from psworker.transport.values import ShardSession

Values = dict[int, Counter[PushId]]
Consists = tuple[int, tuple[WorkerKey, ...]]
Settings = tuple[tuple[float, ...], ...]

OPTIMIZER = "optimizer"


def settings_of(push: PushId) -> Settings:
    """Hyperparameters that no other push has."""
    worker = push.worker
    number = int(worker.worker_id.removeprefix("w"))
    return ((float(number), float(worker.incarnation), float(push.sequence)),)


def whose(settings: Settings) -> PushId:
    """The push that has these."""
    ((number, incarnation, sequence),) = settings
    worker = WorkerKey(f"w{number:.0f}", int(incarnation))
    return PushId(worker, int(sequence))


@dataclass(slots=True)
class Image:
    """A copy of a shard's values."""

    clock: int
    values: Values


@dataclass(frozen=True, slots=True)
class Written:
    """One push in a chunk: added to what is there, or in place of it."""

    push: PushId
    clock: int
    replaces: bool


@dataclass(slots=True)
class Call:
    """One call that carries a push to one shard; number 0 is nobody's any more."""

    push: PushId
    shard_index: int
    number: int


class Surroundings(Protocol):
    """Whom a shard talks to."""

    @property
    def now_ms(self) -> int:
        """Monotonic time."""

    def answer(self, call: Call, reply: Reply) -> None:
        """The answer to a call is on its way, with the values."""

    def give(self, shard: "SimulatedShard", worker: WorkerKey, reply: Reply) -> None:
        """Values leave the shard for a worker."""

    def refuse(self, call: Call, refusal: Refusal) -> None:
        """A refusal of a call is on its way."""

    def stage(self, call: Call, choice: ClockChoice) -> None:
        """Word that a clock is staged is on its way."""

    def ask(self, worker: WorkerKey, clock: int) -> None:
        """A worker without data is asked for its part of a clock."""

    def report(self, shard_index: int, report: FenceReport) -> None:
        """A report is on its way to the coordinator."""

    def report_image(self, shard_index: int, report: CutReport) -> None:
        """Word that an image is there is on its way to the coordinator."""

    def report_part(self, shard_index: int, report: PartReport) -> None:
        """Word of a part of a checkpoint is on its way to the coordinator."""


@dataclass(slots=True)
class SimulatedShard:
    """Core, values and threads of one shard.

    Attributes:
        index: Its place.
        chunk_indexes: Chunks it holds.
        rules: When pushes are applied.
        surroundings: Whom it talks to.
        values: How often each push is in each chunk.
        outcomes: What became of each push.
        answers: Versions and frontiers that were told, in order.
        weights: Of each clock of BSP, the total weights its chunks were divided by.
        scales: Of each clock of BSP, what its chunks were multiplied by.
        sums: What it measured of each clock with these contributors.
        used: Pushes whose settings updates had, with the declaration they were by.
        settings: Of each clock of BSP, the pushes whose settings its chunks had, with
            the push whose state was loaded last.
        declared: Declarations of the optimizer that it knows.
        members: Optimizer state that pushes will load.
        loads: Pushes whose state was loaded, in order.
        written: Of each chunk, the pushes whose gradients were applied, or the one
            whose values replaced all before, in order.
        order: Of each worker, its pushes in the order in which they were done.
        checked: Of each worker, its pushes that were looked for in the values.
        seeder: Who has written first values last.
        images: Snapshots it holds.
        copies: What it has copied, or written, for checkpoints.
        start: Which start of a process in this place it is.
        is_stopped: Whether it does nothing, as after a SIGSTOP.
        threads: Work under way.
        wakes: When it wants to be woken.
        merges: Clocks that it has closed by a quorum.
    """

    index: int
    chunk_indexes: tuple[int, ...]
    rules: ShardRules
    surroundings: Surroundings
    core: ShardCore = field(init=False)
    values: Values = field(init=False)
    outcomes: dict[PushId, Outcome] = field(default_factory=dict)
    answers: list[tuple[int, int]] = field(default_factory=list)
    weights: dict[int, set[float]] = field(default_factory=dict)
    scales: dict[Consists, set[float]] = field(default_factory=dict)
    sums: dict[Consists, float] = field(default_factory=dict)
    used: set[tuple[PushId, str]] = field(default_factory=set)
    settings: dict[int, set[tuple[PushId, PushId | None]]] = field(default_factory=dict)
    declared: set[str] = field(default_factory=lambda: {""})
    members: HostedMembers = field(default_factory=HostedMembers)
    loads: list[PushId] = field(default_factory=list)
    written: dict[int, list[Written]] = field(init=False)
    order: dict[WorkerKey, list[int]] = field(default_factory=dict)
    checked: Counter[WorkerKey] = field(default_factory=Counter)
    seeder: WorkerKey | None = None
    images: dict[int, Image] = field(default_factory=dict)
    copies: dict[int, Image] = field(default_factory=dict)
    threads: list[Callable[[], None]] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    start: int = 1
    is_stopped: bool = False
    _calls: dict[PushId, Call] = field(default_factory=dict)
    _pending: tuple[int, PendingImage[Counter[PushId]]] | None = None

    def __post_init__(self) -> None:
        self.core = ShardCore(self.chunk_indexes, self.rules)
        self.values = {index: Counter() for index in self.chunk_indexes}
        self.written = {index: [] for index in self.chunk_indexes}

    @property
    def name(self) -> str:
        return f"shard {self.index}" + (f"/{self.start}" if self.start > 1 else "")

    @property
    def is_orphaned(self) -> bool:
        return self.core.waiting_reason.startswith("the coordinator")

    def set_orphaned(self, is_orphaned: bool) -> None:
        self.core.set_orphaned(is_orphaned)
        self.pump()

    def run_thread(self, rng: random.Random) -> None:
        """Ends some work; what is done may set off more."""
        self.threads.pop(rng.randrange(len(self.threads)))()
        self.pump()

    def wake(self) -> None:
        """The time has come for which it has asked."""
        now_ms = self.surroundings.now_ms
        self.wakes = [at_ms for at_ms in self.wakes if at_ms > now_ms]
        self.core.wake(now_ms)
        self.pump()

    # From workers

    def knows(self, generation: int) -> bool:
        record = self.core.clocks.record
        return record is not None and record.generation >= generation

    def begin(
        self,
        call: Call,
        clock: int,
        generation: int,
        lowest: int,
        *,
        is_last: bool = False,
    ) -> bool:
        """The first message of a call; False holds it until the record is here."""
        if not self.knows(generation):
            return False
        try:
            now_ms = self.surroundings.now_ms
            self.core.open_push(
                call.push, clock, now_ms, generation=generation, is_last=is_last
            )
            self.core.acknowledge(call.push.worker, lowest)
            reply = self.core.reply_to(call.push)
        except Refusal as refusal:
            self.surroundings.refuse(call, refusal)
            return True
        self._calls[call.push] = call
        self.pump()
        if reply is not None:
            self._finish(call.push, reply)
        return True

    def take(self, call: Call, what: Trailer | int) -> bool:
        """A trailer, or a chunk by its index.

        False holds a trailer by a declaration that the coordinator has not told yet.
        """
        push = call.push
        if isinstance(what, Trailer) and what.spec_digest not in self.declared:
            return False
        try:
            if isinstance(what, Trailer) and what.loads_state:
                member = self.members.of(push.worker)
                member.check_state(self.core, push.sequence, OPTIMIZER)
            now_ms = self.surroundings.now_ms
            entry = self.core.open_push(push, 0, now_ms, generation=-1)
            if entry is None:
                return True
            if isinstance(what, Trailer):
                self.core.add_trailer(push, entry, what)
            else:
                chunk = StagedChunk(
                    digest=hash((push, what)), presence=(True,), payload=push
                )
                self.core.add_chunk(push, entry, what, chunk)
        except Refusal as refusal:
            self._calls.pop(push, None)
            self.surroundings.refuse(call, refusal)
        self.pump()
        return True

    def stage_state(self, push: PushId) -> None:
        """State that a push will load.

        Raises:
            Refusal: With no state changed.
        """
        check_next(self.core, push)
        member = self.members.of(push.worker)
        member.stage_state(self.core, push.sequence, OPTIMIZER, {})

    def commit(self, worker: WorkerKey, choice: ClockChoice, generation: int) -> bool:
        """A worker commits a clock; False holds the call."""
        if not self.knows(generation) or self.core.is_frozen:
            return False
        self.core.commit(worker, choice)
        self.pump()
        return True

    def session(self, worker: WorkerKey) -> ShardSession:
        """What `GetSession` says of a worker's pushes."""
        closed = self.core.closed_sequence(worker)
        entries = self.core.on_shard.window_of(worker).entries
        return ShardSession(
            sequence_done_max=closed,
            held_chunks={
                sequence: frozenset(entry.digests)
                for sequence, entry in entries.items()
                if sequence > closed
            },
        )

    def hang_up(self, worker: WorkerKey) -> None:
        """The worker's calls have ended; what they staged stays."""
        for push in [push for push in self._calls if push.worker == worker]:
            del self._calls[push]
        self.core.withdraw_awaiting(worker)

    def seed(self, worker: WorkerKey, fence_number: int) -> None:
        """A worker writes first values to all chunks.

        Raises:
            Refusal: Another worker is to, or another fence is open.
        """
        self.core.check_seeder(worker, fence_number)
        self.seeder = worker
        for index in self.chunk_indexes:
            self.core.seed_chunk_staged(index)
        self.pump()

    # From the coordinator

    def load(self, fence_number: int, values: Values) -> None:
        """First values are those of a checkpoint: stages them, chunk by chunk."""

        def staged(index: int) -> None:
            if self.core.is_seeding(fence_number):
                self.values[index] = Counter(values[index])
                self.core.seed_chunk_staged(index)

        for index in self.chunk_indexes:
            self.threads.append(partial(staged, index))

    def adopt(self, digests: Collection[str]) -> None:
        """Declarations of the optimizer."""
        self.declared.update(digests)

    def view(self, record: Record | None, closed_number: int) -> None:
        """The whole current state, or a record alone."""
        self.core.set_orphaned(False)
        if record is not None:
            self.core.install_record(record)
            newest = self.core.clocks.record
            assert newest is not None
            self.members.follow(newest, self.core.closed_sequence)
        self.core.abort_fence(closed_number)
        self.pump()

    def release(self, snapshot_id: int) -> None:
        if self._pending is not None and self._pending[0] == snapshot_id:
            self._pending[1].abandon("nobody wants it any more")
        elif self.images.pop(snapshot_id, None) is None:
            self.core.withdraw_cut(snapshot_id)
            self.pump()

    def write(
        self,
        snapshot_id: int,
        rng: random.Random,
        save: Callable[[Image], FilePart] | None = None,
    ) -> None:
        """Writes what it has copied for a checkpoint, or can't."""

        def written() -> None:
            image = self.copies.get(snapshot_id)
            if image is None or rng.random() < 0.1:
                report = PartReport(snapshot_id, failure="it can't be written")
            else:
                part = FilePart(f"part-{self.index}", 1, "0" * 32)
                report = PartReport(snapshot_id, save(image) if save else part)
            self.surroundings.report_part(self.index, report)

        self.threads.append(written)

    # Inside

    def pump(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                if isinstance(effect, PushDone):
                    self._note_outcome(effect)
            for effect in effects:
                self._carry_out(effect)

    def _note_outcome(self, effect: PushDone) -> None:
        push = effect.push
        assert push not in self.outcomes
        self.outcomes[push] = effect.outcome
        self.order.setdefault(push.worker, []).append(push.sequence)

    def _carry_out(self, effect: ShardEffect) -> None:
        match effect:
            case ApplyChunk():
                self.threads.append(lambda: self._apply(effect))
            case MeasureClock():
                self.threads.append(lambda: self._measure(effect))
            case LoadState():
                self._load_state(effect)
            case PushDone():
                self.members.of(effect.push.worker).drop_state(effect.push.sequence)
            case CopyImage():
                self._begin_copy(effect)
            case Finish():
                self._finish(effect.push, effect.reply)
            case RefusePush():
                call = self._calls.pop(effect.push, None)
                if call is not None:
                    self.surroundings.refuse(call, effect.refusal)
            case Staged():
                call = self._calls.get(effect.push)
                if call is not None:
                    self.surroundings.stage(call, effect.choice)
            case WakeAt():
                self.wakes.append(effect.at_ms)
            case ClockClosed():
                self.merges.append(effect.merge)
            case ContributionAwaited():
                self.surroundings.ask(effect.worker, effect.clock)
            case FenceReport():
                self.surroundings.report(self.index, effect)

    def _finish(self, push: PushId, reply: Reply) -> None:
        self.answers.append((reply.version, reply.frontier))
        self.surroundings.give(self, push.worker, reply)
        call = self._calls.pop(push, None)
        if call is not None:
            self.surroundings.answer(call, reply)

    def _apply(self, order: ApplyChunk) -> None:
        if self._pending is not None:
            self._pending[1].take(order.chunk_index)
        names = [part.worker_id for part in order.contributions]
        assert names == sorted(names)
        source = whose(order.hyperparameters)
        assert order.spec_digest in self.declared
        self.used.add((source, order.spec_digest))
        if order.pusher is None:
            self.weights.setdefault(order.clock, set()).add(order.total_weight)
            workers = tuple(push.worker for push in self.core.pushes_of(order.clock))
            scales = self.scales.setdefault((order.clock, workers), set())
            scales.add(order.gradient_scale)
            loaded = self.loads[-1] if self.loads else None
            self.settings.setdefault(order.clock, set()).add((source, loaded))
        self._write(order)
        for part in order.contributions:
            assert isinstance(part.payload, PushId)
            self.values[order.chunk_index][part.payload] += 1
        if order.pusher is not None and not order.contributions:
            # Values that do not count have their turn all the same, once.
            done = self.core.on_shard.window_of(order.pusher).done_sequence
            self.values[order.chunk_index][PushId(order.pusher, done + 1)] += 1
        self.core.chunk_applied(order.chunk_index)

    def _write(self, order: ApplyChunk) -> None:
        """As the tensors of a real shard: values of one push replace what is there."""
        parts = order.contributions
        published = [part for part in parts if part.value_entries]
        assert len(published) in (0, len(parts)), "a clock has steps and values"
        counted = [part for part in published if part.is_source] or published[:1]
        pushes = [part.payload for part in counted or parts]
        held = self.written[order.chunk_index]
        for push in pushes:
            assert isinstance(push, PushId)
            held.append(Written(push, order.clock, replaces=bool(published)))

    def _load_state(self, order: LoadState) -> None:
        member = self.members.of(order.push.worker)
        assert member.state_of(order.push.sequence, order.optimizer) is not None
        assert order.push not in self.loads
        assert order.spec_digest in self.declared
        self.loads.append(order.push)

    def _measure(self, order: MeasureClock) -> None:
        """Each push has a size of its own in each chunk."""
        if order.measures_each:
            self._measure_each(order)
            return
        total = 0.0
        for chunk_index, parts in order.chunks:
            names = [part.worker_id for part in parts]
            assert names == sorted(names)
            for part in parts:
                assert isinstance(part.payload, PushId)
                size = (7 * part.payload.sequence + 3 * chunk_index + len(names)) % 11
                total += part.weight / order.total_weight * size / 11
        self.sums[order.choice[:2]] = total
        self.core.clock_measured(order.choice, total)

    def _measure_each(self, order: MeasureClock) -> None:
        """As if all gradients pointed the same way."""
        count = len(order.choice.workers)
        parts = [part for _, parts in order.chunks for part in parts]
        own = [
            sum(size_of(part.payload) for part in parts if part.worker_id == worker_id)
            for worker_id, _ in order.choice.workers
        ]
        products = tuple(
            own[one] * own[other]
            for one in range(count)
            for other in (range(one, count) if order.measures_pairs else (one,))
        )
        self.core.clock_measured(order.choice, 0.0, products)

    def _begin_copy(self, order: CopyImage) -> None:
        if self._pending is not None:
            self._pending[1].abandon("a newer cut has taken its place")
        image = PendingImage(
            self.chunk_indexes, lambda index: Counter(self.values[index])
        )
        self._pending = order.cut.snapshot_id, image
        self._copy_next(order, image, iter(self.chunk_indexes))

    def _copy_next(
        self,
        order: CopyImage,
        image: PendingImage[Counter[PushId]],
        left: Iterator[int],
    ) -> None:
        """Copies a chunk, as the thread does that goes through all, then the next."""

        def copy() -> None:
            for index in left:
                image.take(index)
                self._copy_next(order, image, left)
                return
            self._end_copy(order, image)

        self.threads.append(copy)

    def _end_copy(self, order: CopyImage, image: PendingImage[Counter[PushId]]) -> None:
        if self._pending is not None and self._pending[1] is image:
            self._pending = None
        snapshot_id, core = order.cut.snapshot_id, order.core
        if not image.failure:
            kept = self.images if core is None else self.copies
            kept[snapshot_id] = Image(order.clock, image.chunks)
        holdings = core.holdings if core else ()
        report = CutReport(snapshot_id, image.failure, holdings)
        self.surroundings.report_image(self.index, report)


def size_of(payload: object) -> float:
    """Of a chunk of a push: one in four is large."""
    assert isinstance(payload, PushId)
    return 10.0 if (payload.sequence + len(payload.worker.worker_id)) % 4 == 0 else 0.5
