"""A worker of the simulated world: pushes until its quota is used up, then leaves."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from psserver.shard.core.push import PushId, Reply, Trailer
from pswire.clipping import gradient_scale
from pswire.membership import ClockChoice, Member, Mode, Record, WorkerKey
from pswire.outcome import Outcome
from pswire.schema import OptimizerSpec
from tests.doubles.declared_specs import LATER
from tests.doubles.simulated_shard import Call, settings_of


class Stage(Enum):
    """What a worker is doing."""

    JOINING = "joining"
    PULLING = "pulling"
    READY = "ready"
    DECLARING = "declaring"
    STAGING = "staging"
    IDLE = "idle"
    PUSHING = "pushing"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True)
class OwnPush:
    """A push as its worker made it; it never changes."""

    push: PushId
    trailers: dict[int, Trailer]
    answers: dict[int, Reply] = field(default_factory=dict)

    @property
    def trailer(self) -> Trailer:
        """What is the same for all shards."""
        return self.trailers[0]

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """Where the gradient belongs: shard and chunk."""
        for shard_index, trailer in self.trailers.items():
            if trailer.weight > 0:
                for chunk_index in sorted(trailer.chunk_indexes):
                    yield shard_index, chunk_index


class Network(Protocol):
    """Whom a worker talks to, and whims that are drawn."""

    rng: random.Random
    chunks_by_shard: tuple[tuple[int, ...], ...]
    clip_grad_norm: float
    declares: bool
    publishes: bool

    def pull(self, worker: "SimulatedWorker") -> None:
        """Asks every shard for values at the worker's clock."""

    def deliver_push(
        self, worker: "SimulatedWorker", call: Call, skip: frozenset[int]
    ) -> None:
        """Sends a push to a shard, without the chunks it has."""

    def commit(self, worker: "SimulatedWorker", choice: ClockChoice) -> None:
        """Commits a clock on every shard."""

    def ready(self, worker: "SimulatedWorker", sequence: int) -> None:
        """Tells shard 0 that every shard has all of a push, and asks who counts."""

    def await_contribution(self, worker: "SimulatedWorker") -> None:
        """Tells shard 0 that there is no data for the next push."""

    def withdraw_awaiting(self, worker: "SimulatedWorker") -> None:
        """There is data after all."""

    def declare(self, worker: "SimulatedWorker", spec: OptimizerSpec) -> None:
        """Tells the coordinator what the script's optimizer is from now on."""

    def publishes_at(self, sequence: int) -> bool:
        """Whether the script publishes by the push of this number."""

    def stage_state(self, worker: "SimulatedWorker", push: PushId) -> None:
        """Sends every shard the state that a push will load."""

    def leave(self, worker: "SimulatedWorker") -> None:
        """Asks to leave."""

    def evicted(self, worker: "SimulatedWorker") -> None:
        """The worker hears that it is no member any more."""

    def settle_predecessor(self, worker: "SimulatedWorker") -> None:
        """Asks every shard how far the worker's last incarnation got."""


@dataclass(slots=True)
class SimulatedWorker:
    """One start of one worker.

    Attributes:
        key: Which one.
        network: Whom it talks to.
        step_count: Pushes it makes before it leaves.
        predecessor: The same process under its last incarnation.
        stage: What it is doing.
        is_stopped: Whether it does nothing, as after a SIGSTOP.
        member: Its place, once a record has told.
        generation: Newest generation it has heard of.
        sequence: Pushes that every shard has answered.
        pushes: All its pushes.
        declared_count: Changes of its optimizer that the script has come to.
        spec_digest: Declaration that its pushes are made by, empty for the first.
    """

    key: WorkerKey
    network: Network
    step_count: int
    predecessor: "SimulatedWorker | None" = None
    stage: Stage = Stage.JOINING
    is_stopped: bool = False
    member: Member | None = None
    generation: int = 0
    sequence: int = 0
    pushes: dict[int, OwnPush] = field(default_factory=dict)
    pull_number: int = 0
    declared_count: int = 0
    spec_digest: str = ""
    _pulled: set[int] = field(default_factory=set)
    _staged: dict[int, ClockChoice] = field(default_factory=dict)
    _calls: dict[int, Call] = field(default_factory=dict)
    _call_count: int = 0
    _holding_state: set[int] = field(default_factory=set)
    _is_longest: bool = False

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def clock(self) -> int:
        assert self.member is not None
        return self.member.clock_of(self.sequence)

    @property
    def is_gone(self) -> bool:
        return self.stage is Stage.GONE

    @property
    def awaited_shards(self) -> list[int]:
        """Shards that have not given it what it waits for."""
        if self.is_stopped:
            return []
        if self.stage is Stage.PULLING:
            indexes = range(len(self.network.chunks_by_shard))
            return [index for index in indexes if index not in self._pulled]
        return list(self._calls) if self.stage is Stage.PUSHING else []

    @property
    def may_act(self) -> bool:
        """Whether it does something without being told."""
        return self.stage in (Stage.READY, Stage.IDLE) and not self.is_stopped

    def act(self) -> None:
        """The user's thread takes its next turn."""
        rng = self.network.rng
        if self.stage is Stage.IDLE:
            self.network.withdraw_awaiting(self)
            self._push(weight=1.0)
        elif len(self.pushes) >= self.step_count:
            self.stage = Stage.LEAVING
            self.network.leave(self)
        elif rng.random() < 0.2:
            self.stage = Stage.IDLE
            self.network.await_contribution(self)
        elif self.network.declares and rng.random() < 0.3:
            self._change_optimizer()
        else:
            self._push(weight=rng.choice((0.0, 1.0, 1.0, 2.0)))

    def _change_optimizer(self) -> None:
        """The script adds a group, prepares another optimizer, or loads state."""
        if self.declared_count < len(LATER) and self.network.rng.random() < 0.5:
            self.stage = Stage.DECLARING
            self.declare_next()
        else:
            self.stage = Stage.STAGING
            self._holding_state.clear()
            self.network.stage_state(self, PushId(self.key, self.sequence + 1))

    def declare_next(self) -> None:
        """Tells the coordinator of the next change, be it again."""
        self.network.declare(self, LATER[self.declared_count])

    # From the coordinator

    def declared(self, spec: OptimizerSpec) -> None:
        """The coordinator knows what the script's optimizer is now."""
        if self.stage is Stage.DECLARING and spec == LATER[self.declared_count]:
            self.declared_count += 1
            self.spec_digest = spec.digest
            self.stage = Stage.READY

    def heard(self, record: Record) -> None:
        if record.generation <= self.generation or self.is_gone:
            return
        self.generation = record.generation
        self._is_longest = bool(record.members) and record.has_longest(self.key)
        was_member = self.member is not None
        member = record.member_of(self.key)
        if member is not None:
            self.member = member
        if self.stage is Stage.JOINING and member is not None:
            self._pull()
        elif member is None and was_member and self.stage is Stage.LEAVING:
            self.stage = Stage.GONE
        elif member is None and was_member:
            self.network.evicted(self)

    # From shards

    def pulled(self, shard_index: int, pull_number: int) -> None:
        if pull_number != self.pull_number:
            return
        self._pulled.add(shard_index)
        is_all = len(self._pulled) == len(self.network.chunks_by_shard)
        if self.stage is Stage.PULLING and is_all:
            self.stage = Stage.READY
            if self.predecessor is not None:
                self.network.settle_predecessor(self)
                self.declared_count = self.predecessor.declared_count
                self.spec_digest = self.predecessor.spec_digest
                self.predecessor = None

    def state_staged(self, push: PushId, shard_index: int) -> None:
        """A shard has the state that a push will load."""
        if self.stage is Stage.STAGING and push.sequence == self.sequence + 1:
            self._holding_state.add(shard_index)
            if len(self._holding_state) == len(self.network.chunks_by_shard):
                weight = self.network.rng.choice((0.0, 1.0, 2.0))
                self._push(weight=weight, loads_state=True)

    def asked(self) -> None:
        """Something waits for nobody but workers without data."""
        if self.stage is Stage.IDLE:
            self._push(weight=0.0, is_empty=True)

    def told_staged(self, call: Call, choice: ClockChoice) -> None:
        """A shard has all of a clock, or of this worker's push."""
        if self._calls.get(call.shard_index) is not call:
            return
        self._staged[call.shard_index] = choice
        staged = self._staged
        is_everywhere = len(staged) == len(self.network.chunks_by_shard)
        if is_everywhere and len({c.workers for c in staged.values()}) == 1:
            if choice.workers:
                total = math.fsum(staged[i].sum_of_squares for i in sorted(staged))
                norm, limit = math.sqrt(total), self.network.clip_grad_norm
                scale = gradient_scale(norm, limit)
                choice = ClockChoice(choice.clock, choice.workers, total, scale)
                self.network.commit(self, choice)
            else:
                self.network.ready(self, call.push.sequence)

    def told_choice(self, sequence: int, choice: ClockChoice) -> None:
        """Shard 0 says whose pushes count."""
        is_open = self.stage is Stage.PUSHING and sequence == self.sequence + 1
        if is_open and self.key in choice.workers:
            self.network.commit(self, choice)

    def answered(self, call: Call, reply: Reply) -> None:
        if self._calls.get(call.shard_index) is not call:
            return
        own = self.pushes[call.push.sequence]
        if reply.outcome is not Outcome.DROPPED:
            if reply.mode is Mode.BSP:
                assert reply.frontier >= reply.clock
            elif reply.mode is Mode.SSP:
                assert reply.clock - reply.frontier <= reply.staleness_bound
        own.answers[call.shard_index] = reply
        del self._calls[call.shard_index]
        if self._calls or self.stage is not Stage.PUSHING:
            return
        self.sequence = call.push.sequence
        self.stage = Stage.READY
        if self.outcome_of(own) is Outcome.DROPPED:
            closed = max(each.closed_sequence for each in own.answers.values())
            self.sequence = max(self.sequence, closed)
            self._pull()

    def is_calling(self, shard_index: int) -> bool:
        return shard_index in self._calls

    def resend(self, shard_index: int, held: frozenset[int]) -> None:
        """After an unknown outcome: the same push again, without what is held."""
        if shard_index in self._calls and not self.is_gone:
            self._call(self._calls[shard_index].push, shard_index, held)

    @property
    def acknowledged(self) -> list[OwnPush]:
        """Pushes that every shard has answered."""
        return [
            own for own in self.pushes.values() if own.push.sequence <= self.sequence
        ]

    def outcome_of(self, own: OwnPush) -> Outcome:
        """As `psworker` combines it: what any shard says that is not plain."""
        outcomes = {reply.outcome for reply in own.answers.values()}
        for outcome in (Outcome.DROPPED, Outcome.SKIPPED):
            if outcome in outcomes:
                return outcome
        return Outcome.APPLIED

    # Inside

    def _pull(self) -> None:
        self.stage = Stage.PULLING
        self.pull_number += 1
        self._pulled.clear()
        self.network.pull(self)

    def _push(
        self, *, weight: float, is_empty: bool = False, loads_state: bool = False
    ) -> None:
        rng = self.network.rng
        publishes = not is_empty and self.network.publishes_at(self.sequence + 1)
        if publishes:
            weight = 1.0
        is_finite = is_empty or publishes or rng.random() < 0.85
        push = PushId(self.key, self.sequence + 1)
        trailers = {
            shard_index: Trailer(
                optimizer="optimizer",
                weight=weight,
                hyperparameters=settings_of(push),
                finite=is_finite,
                loads_state=loads_state,
                is_of_longest=self._is_longest,
                spec_digest=self.spec_digest,
                chunk_indexes=frozenset(
                    index
                    for index in chunk_indexes
                    if is_finite and not is_empty and (publishes or rng.random() < 0.8)
                ),
                value_entries=frozenset({0} if publishes else ()),
                publishes=publishes,
            )
            for shard_index, chunk_indexes in enumerate(self.network.chunks_by_shard)
        }
        self.pushes[push.sequence] = OwnPush(push, trailers)
        self.stage = Stage.PUSHING
        self._staged.clear()
        for shard_index in trailers:
            self._call(push, shard_index, frozenset())

    def _call(self, push: PushId, shard_index: int, held: frozenset[int]) -> None:
        self._call_count += 1
        call = Call(push, shard_index, self._call_count)
        self._calls[shard_index] = call
        self._staged.pop(shard_index, None)
        self.network.deliver_push(self, call, held)
