"""A shard of the simulated world: the real core, with values that count pushes.

The gradient of a push adds one to its own counter and nothing else, so that values
tell exactly which pushes are in them, and how often.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from psserver.core.dedupe import ChunkState
from psserver.core.effects import (
    ApplyChunk,
    ContributionAwaited,
    CopyImage,
    FenceReport,
    Finish,
    RefusePush,
    ShardEffect,
)
from psserver.core.push import PushId, Reply, StagedChunk, Trailer
from psserver.core.record import Record, WorkerKey
from psserver.core.shard import ShardCore
from pswire.reasons import Refusal

Values = dict[int, Counter[PushId]]


@dataclass(slots=True)
class Image:
    """A copy of a shard's values."""

    clock: int
    values: Values


@dataclass(slots=True)
class Call:
    """One call that carries a push to one shard."""

    push: PushId
    shard_index: int
    number: int


class Surroundings(Protocol):
    """Whom a shard talks to."""

    def answer(self, call: Call, reply: Reply) -> None:
        """The answer to a call is on its way."""

    def refuse(self, call: Call, refusal: Refusal) -> None:
        """A refusal of a call is on its way."""

    def ask(self, worker: WorkerKey, clock: int) -> None:
        """A worker without data is asked for its part of a clock."""

    def report(self, shard_index: int, report: FenceReport) -> None:
        """A report is on its way to the coordinator."""

    def report_image(self, shard_index: int, snapshot_id: int) -> None:
        """Word that an image is there is on its way to the coordinator."""


@dataclass(slots=True)
class SimulatedShard:
    """Core, values and threads of one shard.

    Attributes:
        index: Its place.
        chunk_indexes: Chunks it holds.
        values: How often each push is in each chunk.
        finished: Of each clock, the pushes it consisted of with their answers.
        images: Snapshots it holds.
        threads: What its threads are doing; each entry ends one piece of work.
    """

    index: int
    chunk_indexes: tuple[int, ...]
    surroundings: Surroundings
    core: ShardCore = field(init=False)
    values: Values = field(init=False)
    finished: dict[int, dict[PushId, Reply]] = field(default_factory=dict)
    images: dict[int, Image] = field(default_factory=dict)
    threads: list[Callable[[], None]] = field(default_factory=list)
    _calls: dict[PushId, Call] = field(default_factory=dict)
    _unwanted_max: int = 0

    def __post_init__(self) -> None:
        self.core = ShardCore(self.chunk_indexes)
        self.values = {index: Counter() for index in self.chunk_indexes}

    @property
    def name(self) -> str:
        return f"shard {self.index}"

    def run_thread(self, rng: random.Random) -> None:
        """Some thread is done; two chunks may end in any order."""
        work = self.threads.pop(rng.randrange(len(self.threads)))
        work()
        self.pump()

    # From workers

    def knows(self, generation: int) -> bool:
        record = self.core.clocks.record
        return record is not None and record.generation >= generation

    def begin(self, call: Call, clock: int, generation: int, lowest: int) -> bool:
        """The first message of a call; False holds it until the record is here."""
        if not self.knows(generation):
            return False
        try:
            self.core.open_push(call.push, clock, 0)
            self.core.acknowledge(call.push.worker, lowest)
            reply = self.core.reply_to(call.push)
        except Refusal as refusal:
            self.surroundings.refuse(call, refusal)
            return True
        self._calls[call.push] = call
        if reply is not None:
            self._finish(call.push, reply)
        self.pump()
        return True

    def take(self, call: Call, what: Trailer | int) -> None:
        """A trailer, or a chunk by its index."""
        push = call.push
        try:
            entry = self.core.open_push(push, self._clock_of(push), 0)
            if entry is None:
                return
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

    def held(self, push: PushId) -> frozenset[int]:
        """What `GetSession` says of an unfinished push."""
        window = self.core.dedupe.window_of(push.worker)
        entry = window.entries.get(push.sequence)
        if push.sequence <= window.done_sequence:
            return frozenset(self.chunk_indexes)
        if entry is None:
            return frozenset()
        return frozenset(
            index
            for index in self.chunk_indexes
            if entry.state_of(index) is not ChunkState.ABSENT
        )

    def hang_up(self, worker: WorkerKey) -> None:
        """The worker's calls have ended; what they staged stays."""
        for push in [push for push in self._calls if push.worker == worker]:
            del self._calls[push]
        self.core.withdraw_awaiting(worker)

    # From the coordinator

    def view(self, record: Record | None, closed_number: int) -> None:
        """The whole current state, or a record alone."""
        if record is not None:
            self.core.install_record(record)
        self.core.abort_fence(closed_number)
        self.pump()

    def release(self, snapshot_id: int) -> None:
        if self.images.pop(snapshot_id, None) is None:
            self._unwanted_max = max(self._unwanted_max, snapshot_id)
            self.core.withdraw_cut(snapshot_id)
            self.pump()

    # Inside

    def pump(self) -> None:
        while effects := self.core.take_effects():
            for effect in effects:
                self._carry_out(effect)

    def _clock_of(self, push: PushId) -> int:
        member = self.core.clocks.member_of(push.worker)
        if member is None:
            departure = self.core.clocks.departure_of(push.worker)
            member = departure.member if departure is not None else None
        return (member.base_clock if member is not None else 0) + push.sequence

    def _carry_out(self, effect: ShardEffect) -> None:
        match effect:
            case ApplyChunk():
                self.threads.append(lambda: self._apply(effect))
            case CopyImage():
                self.threads.append(lambda: self._copy(effect))
            case Finish():
                clock = effect.reply.clock
                self.finished.setdefault(clock, {})[effect.push] = effect.reply
                self._finish(effect.push, effect.reply)
            case RefusePush():
                call = self._calls.pop(effect.push, None)
                if call is not None:
                    self.surroundings.refuse(call, effect.refusal)
            case ContributionAwaited():
                self.surroundings.ask(effect.worker, effect.clock)
            case FenceReport():
                self.surroundings.report(self.index, effect)

    def _finish(self, push: PushId, reply: Reply) -> None:
        call = self._calls.pop(push, None)
        if call is not None:
            self.surroundings.answer(call, reply)

    def _apply(self, order: ApplyChunk) -> None:
        assert not self.core.waiting_reason.startswith("a snapshot")
        names = [part.worker_id for part in order.contributions]
        assert names == sorted(names)
        for part in order.contributions:
            assert isinstance(part.payload, PushId)
            self.values[order.chunk_index][part.payload] += 1
        self.core.chunk_applied(order.chunk_index)

    def _copy(self, order: CopyImage) -> None:
        copied = {index: Counter(values) for index, values in self.values.items()}
        if order.snapshot_id > self._unwanted_max:
            self.images[order.snapshot_id] = Image(order.clock, copied)
        self.core.image_copied(order.snapshot_id)
        self.surroundings.report_image(self.index, order.snapshot_id)
