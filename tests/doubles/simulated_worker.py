"""A worker of the simulated world: pushes until its quota is used up, then leaves."""

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from psserver.core.push import Outcome, PushId, Reply, Trailer
from psserver.core.record import Member, Record, WorkerKey
from tests.doubles.simulated_shard import Call


class Stage(Enum):
    """What a worker is doing."""

    JOINING = "joining"
    PULLING = "pulling"
    READY = "ready"
    IDLE = "idle"
    PUSHING = "pushing"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True)
class OwnPush:
    """A push as its worker made it; it never changes."""

    push: PushId
    clock: int
    trailers: dict[int, Trailer]
    answers: dict[int, Reply] = field(default_factory=dict)


class Network(Protocol):
    """Whom a worker talks to, and whims that are drawn."""

    rng: random.Random
    chunks_by_shard: tuple[tuple[int, ...], ...]

    def pull(self, worker: "SimulatedWorker", clock: int) -> None:
        """Asks every shard to say when it has reached a clock."""

    def deliver_push(
        self, worker: "SimulatedWorker", call: Call, skip: frozenset[int]
    ) -> None:
        """Sends a push to a shard, without the chunks it has."""

    def await_contribution(self, worker: "SimulatedWorker") -> None:
        """Tells shard 0 that there is no data for the next clock."""

    def withdraw_awaiting(self, worker: "SimulatedWorker") -> None:
        """There is data after all."""

    def leave(self, worker: "SimulatedWorker") -> None:
        """Asks to leave."""


@dataclass(slots=True)
class SimulatedWorker:
    """One start of one worker.

    Attributes:
        key: Which one.
        network: Whom it talks to.
        step_count: Pushes it makes before it leaves.
        stage: What it is doing.
        member: Its place, once a record has told.
        generation: Newest generation it has heard of.
        sequence: Pushes that every shard has answered.
        pushes: All its pushes.
    """

    key: WorkerKey
    network: Network
    step_count: int
    stage: Stage = Stage.JOINING
    member: Member | None = None
    generation: int = 0
    sequence: int = 0
    pushes: dict[int, OwnPush] = field(default_factory=dict)
    _pulled: set[int] = field(default_factory=set)
    _calls: dict[int, Call] = field(default_factory=dict)
    _call_count: int = 0

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def clock(self) -> int:
        assert self.member is not None
        return self.member.base_clock + self.sequence

    @property
    def is_gone(self) -> bool:
        return self.stage is Stage.GONE

    @property
    def may_act(self) -> bool:
        """Whether it does something without being told."""
        return self.stage in (Stage.READY, Stage.IDLE)

    def act(self) -> None:
        """The user's thread takes its next turn."""
        rng = self.network.rng
        if self.stage is Stage.IDLE:
            self.network.withdraw_awaiting(self)
            self._push(weight=1.0)
        elif self.sequence >= self.step_count:
            self.stage = Stage.LEAVING
            self.network.leave(self)
        elif rng.random() < 0.2:
            self.stage = Stage.IDLE
            self.network.await_contribution(self)
        else:
            self._push(weight=rng.choice((0.0, 1.0, 1.0, 2.0)))

    # From the coordinator

    def heard(self, record: Record) -> None:
        if record.generation <= self.generation:
            return
        self.generation = record.generation
        member = record.member_of(self.key)
        if self.stage is Stage.JOINING and member is not None:
            self.member = member
            self.stage = Stage.PULLING
            self.network.pull(self, member.base_clock)

    # From shards

    def pulled(self, shard_index: int) -> None:
        self._pulled.add(shard_index)
        is_all = len(self._pulled) == len(self.network.chunks_by_shard)
        if self.stage is Stage.PULLING and is_all:
            self.stage = Stage.READY

    def asked(self, clock: int) -> None:
        """A clock waits for nobody but workers without data."""
        if self.stage is Stage.IDLE:
            assert clock == self.clock + 1
            self._push(weight=0.0, is_empty=True)

    def answered(self, call: Call, reply: Reply) -> None:
        if self._calls.get(call.shard_index) is not call:
            return
        own = self.pushes[call.push.sequence]
        assert reply.clock == own.clock
        own.answers[call.shard_index] = reply
        del self._calls[call.shard_index]
        if not self._calls and self.stage is Stage.PUSHING:
            self.sequence = call.push.sequence
            self.stage = Stage.READY

    def is_calling(self, shard_index: int) -> bool:
        return shard_index in self._calls

    def resend(self, shard_index: int, held: frozenset[int]) -> None:
        """After an unknown outcome: the same push again, without what is held."""
        if shard_index in self._calls:
            self._call(self._calls[shard_index].push, shard_index, held)

    @property
    def acknowledged(self) -> list[OwnPush]:
        """Pushes that every shard has answered."""
        return [
            own for own in self.pushes.values() if own.push.sequence <= self.sequence
        ]

    def outcome_of(self, own: OwnPush) -> Outcome:
        """As `psworker` combines it: skipped if any shard says so."""
        outcomes = {reply.outcome for reply in own.answers.values()}
        return Outcome.SKIPPED if Outcome.SKIPPED in outcomes else Outcome.APPLIED

    # Inside

    def _push(self, *, weight: float, is_empty: bool = False) -> None:
        rng = self.network.rng
        is_finite = is_empty or rng.random() < 0.85
        push = PushId(self.key, self.sequence + 1)
        trailers = {
            shard_index: Trailer(
                optimizer="optimizer",
                weight=weight,
                hyperparameters=((0.1,),),
                finite=is_finite,
                chunk_indexes=frozenset(
                    index
                    for index in chunk_indexes
                    if is_finite and not is_empty and rng.random() < 0.8
                ),
            )
            for shard_index, chunk_indexes in enumerate(self.network.chunks_by_shard)
        }
        self.pushes[push.sequence] = OwnPush(push, self.clock + 1, trailers)
        self.stage = Stage.PUSHING
        for shard_index in trailers:
            self._call(push, shard_index, frozenset())

    def _call(self, push: PushId, shard_index: int, held: frozenset[int]) -> None:
        self._call_count += 1
        call = Call(push, shard_index, self._call_count)
        self._calls[shard_index] = call
        self.network.deliver_push(self, call, held)
