"""A worker of the simulated world: the real core, and a script that draws its steps.

What the script does next, and when calls break, is drawn. What follows from that in the
protocol is decided by `MemberCore`, as in a real worker.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from psserver.shard.core.push import PushId, Reply, Trailer
from pswire.aggregation import UpdateRules
from pswire.leased_data import DataRange
from pswire.membership import ClockChoice, Outcome, Record, WorkerKey
from pswire.schema import OptimizerSpec
from psworker.member.core import (
    Ask,
    Begin,
    Choose,
    Commit,
    Join,
    MemberCore,
    Missed,
    NextPush,
    OpenPush,
    Pull,
    Seed,
    Send,
    outcome_of_closed,
    outcome_of_done,
    was_done,
)
from psworker.optim.push_result import worst_outcome
from psworker.transport.values import PushReply, SeedOrder, ShardSession
from tests.doubles.declared_specs import LATER
from tests.doubles.simulated_shard import Call, settings_of


class Stage(Enum):
    """What a worker is doing."""

    JOINING = "joining"
    PULLING = "pulling"
    READY = "ready"
    DECLARING = "declaring"
    STAGING = "staging"
    SETTLING = "settling"
    IDLE = "idle"
    PUSHING = "pushing"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(slots=True)
class OwnPush:
    """A push as its worker made it; it never changes.

    Attributes:
        push: Its id.
        place: Where it belongs.
        trailers: What completes it, by shard.
        answers: Of shards that have answered it.
        outcome: What its worker was told of it, empty while it was told nothing.
    """

    push: PushId
    place: NextPush
    trailers: dict[int, Trailer]
    answers: dict[int, PushReply] = field(default_factory=dict)
    outcome: str = ""

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
    update: UpdateRules
    declares: bool
    publishes: bool
    steps_again: bool
    has_bsp: bool

    def join(self, worker: "DrivenWorker", question: Join) -> None:
        """Asks the coordinator for a place."""

    def seed(self, worker: "DrivenWorker", order: SeedOrder, number: int) -> None:
        """Writes the first values to every shard."""

    def check_seeder(self, worker: "DrivenWorker") -> None:
        """The worker begins with the values that are its own."""

    def pull(self, worker: "DrivenWorker", pull: Pull) -> None:
        """Asks every shard for values at the worker's clock."""

    def ask_session(self, worker: "DrivenWorker", call: Call) -> None:
        """Asks a shard what it has of the worker's pushes."""

    def sequences_done(self, key: WorkerKey) -> list[int]:
        """Of every shard, the last push of a worker that has ended that counts."""

    def deliver_push(
        self, worker: "DrivenWorker", call: Call, skip: frozenset[int]
    ) -> None:
        """Sends a push to a shard, without the chunks it has."""

    def commit(self, worker: "DrivenWorker", choice: ClockChoice) -> None:
        """Commits a clock on every shard."""

    def ready(self, worker: "DrivenWorker", sequence: int) -> None:
        """Tells shard 0 that every shard has all of a push, and asks who counts."""

    def await_contribution(self, worker: "DrivenWorker") -> None:
        """Tells shard 0 that there is no data for the next push."""

    def withdraw_awaiting(self, worker: "DrivenWorker") -> None:
        """There is data after all."""

    def declare(self, worker: "DrivenWorker", spec: OptimizerSpec) -> None:
        """Tells the coordinator what the script's optimizer is from now on."""

    def draw(self, worker: "DrivenWorker") -> tuple[DataRange, ...]:
        """Leases the data of the next push, if the script has any."""

    def publishes_at(self, sequence: int) -> bool:
        """Whether the script publishes by the push of this number."""

    def stage_state(self, worker: "DrivenWorker", push: PushId) -> None:
        """Sends every shard the state that a push will load."""

    def leave(self, worker: "DrivenWorker") -> None:
        """Asks to leave."""

    def evicted(self, worker: "DrivenWorker") -> None:
        """The worker hears that it is no member any more."""


@dataclass(slots=True)
class DrivenWorker:
    """One start of one worker.

    Attributes:
        key: Which one.
        network: Whom it talks to.
        step_count: Pushes it makes before it leaves.
        predecessor: The start before of the same process, while it is asked what
            became of the push that was under way at its eviction.
        core: What it decides.
        stage: What it is doing.
        is_stopped: Whether it does nothing, as after a SIGSTOP.
        pushes: All its pushes.
        pull_number: Pulls that it has begun.
        declared_count: Changes of its optimizer that the script has come to.
        spec_digest: Declaration that its pushes are made by, empty for the first.
    """

    key: WorkerKey
    network: Network
    step_count: int
    predecessor: "DrivenWorker | None" = None
    core: MemberCore = field(init=False)
    stage: Stage = Stage.JOINING
    is_stopped: bool = False
    pushes: dict[int, OwnPush] = field(default_factory=dict)
    pull_number: int = 0
    declared_count: int = 0
    spec_digest: str = ""
    _question: Join | None = None
    _order: SeedOrder | None = None
    _seeding_number: int = 0
    _seeded: set[int] = field(default_factory=set)
    _pulled: set[int] = field(default_factory=set)
    _missed: Missed | None = None
    _open: OpenPush | None = None
    _calls: dict[int, Call] = field(default_factory=dict)
    _call_count: int = 0
    _holding_state: set[int] = field(default_factory=set)
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _successor: "DrivenWorker | None" = None

    def __post_init__(self) -> None:
        self.core = MemberCore(self.key, self.network.update)
        self.core.want_place()

    @property
    def name(self) -> str:
        return str(self.key)

    @property
    def is_member(self) -> bool:
        """Whether the newest record that it knows has a place for it."""
        return self.core.member is not None

    @property
    def sequence(self) -> int:
        """Pushes that every shard has answered."""
        return self.core.sequence

    @property
    def is_gone(self) -> bool:
        return self.stage is Stage.GONE

    @property
    def awaited_shards(self) -> list[int]:
        """Shards that have not given it what it waits for."""
        if self.is_stopped:
            return []
        if self.stage is Stage.PULLING and self._missed is None:
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
        elif rng.random() < 0.2 and not self._continues_batch():
            self.stage = Stage.IDLE
            self.network.await_contribution(self)
        elif self.network.declares and rng.random() < 0.3:
            self._change_optimizer()
        else:
            self._push(weight=rng.choice((0.0, 1.0, 1.0, 2.0)))

    def _continues_batch(self) -> bool:
        """Whether the next push is the second one on its batch.

        In BSP workers do so in step, and else each for itself.
        """
        if not (self.network.steps_again and self.pushes):
            return False
        place = self.core.next_push()
        number = place.clock if self.network.has_bsp else place.sequence
        return number % 2 == 0

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

    def heard(self, record: Record | None) -> None:
        """The coordinator has sent all that it knows, with its newest record."""
        if self.is_gone:
            return
        self.core.view_count += 1
        self._question = None  # what was lost with a watch is asked again
        if record is not None and self.core.take_record(record) is not None:
            if self.stage is Stage.LEAVING:
                self.stage = Stage.GONE
            else:
                self.network.evicted(self)
        elif self._missed is not None:
            self._catch_up(self._missed)
        self._go_on_joining()

    def ordered(self, order: SeedOrder | None) -> None:
        """The coordinator orders this worker to seed, or another one."""
        self.core.order = order
        self._go_on_joining()

    def asked_to_join(self, question: Join) -> None:
        """The coordinator has taken the question for a place."""
        if self._question is question:
            self._question = None
            self.core.joined(question)
            self._go_on_joining()

    def _go_on_joining(self) -> None:
        if self.stage is not Stage.JOINING or self._question is not None:
            return
        if self._order is not None:
            if not self.core.is_over(self._order):
                return
            self._order = None
        match self.core.next_to_join():
            case Join() as question:
                self._question = question
                self.network.join(self, question)
            case Seed(order):
                self._order = order
                self._seeding_number += 1
                self._seeded.clear()
                self.network.seed(self, order, self._seeding_number)
            case Begin(pull=None):
                self.network.check_seeder(self)
                self._begin()
            case Begin(pull=Pull() as pull):
                self._pull(pull)

    # From shards

    def seeded(self, number: int, shard_index: int) -> None:
        """A shard has all first values."""
        if self._order is not None and number == self._seeding_number:
            self._seeded.add(shard_index)
            if len(self._seeded) == len(self.network.chunks_by_shard):
                self.core.seeded(self._order)
                self._order = None
                self._go_on_joining()

    def seed_refused(self, number: int) -> None:
        """A shard does not take this worker's values, as far as it knows."""
        if self._order is not None and number == self._seeding_number:
            self._order = None
            self._go_on_joining()

    def pulled(self, shard_index: int, pull_number: int) -> None:
        if pull_number != self.pull_number or self.stage is not Stage.PULLING:
            return
        self._pulled.add(shard_index)
        if len(self._pulled) < len(self.network.chunks_by_shard):
            return
        self._begin()

    def _begin(self) -> None:
        self.stage = Stage.READY
        old = self.predecessor
        if old is not None:
            self.declared_count = old.declared_count
            self.spec_digest = old.spec_digest
            old.settle_for(self)

    def settle_for(self, successor: "DrivenWorker") -> None:
        """Finds out what became of the push that was under way at the eviction."""
        own = self.pushes.get(self.sequence + 1)
        done = self.network.sequences_done(self.key)
        assert len(set(done)) == 1, f"shards differ in how far {self.key} got: {done}"
        if own is None or own.outcome or not was_done(own.push.sequence, done):
            if own is not None and not own.outcome:
                own.outcome = "dropped"
            successor.predecessor = None
            return
        successor.stage = Stage.SETTLING
        self._successor = successor
        for shard_index in own.trailers:
            self._call(own.push, shard_index, own.trailers[shard_index].chunk_indexes)

    def refused(self, call: Call) -> None:
        """A shard refuses to answer a push of a start that has ended."""
        if self._calls.get(call.shard_index) is call and self._successor is not None:
            own = self.pushes[call.push.sequence]
            outcome = outcome_of_closed(is_finite=own.trailer.finite)
            self._note_outcome(call, outcome)

    def _note_outcome(self, call: Call, outcome: Outcome) -> None:
        """A shard says what became of the push that was under way at the eviction."""
        del self._calls[call.shard_index]
        self._outcomes[call.shard_index] = outcome
        successor = self._successor
        if successor is None or len(self._outcomes) < len(self.network.chunks_by_shard):
            return
        self.pushes[call.push.sequence].outcome = outcome_of_done(
            self._outcomes.values()
        )
        self.core.acknowledge(call.push.sequence)
        self._successor = successor.predecessor = None
        if successor.stage is Stage.SETTLING:
            successor.stage = Stage.READY

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
        if self._calls.get(call.shard_index) is call and self._open is not None:
            self._carry_out(self._open.staged(call.shard_index, choice))

    def told_choice(self, sequence: int, choice: ClockChoice) -> None:
        """Shard 0 says whose pushes count."""
        is_open = self.stage is Stage.PUSHING and sequence == self.sequence + 1
        if is_open and self._open is not None:
            self._carry_out(self._open.chosen(choice))

    def _carry_out(self, step: Commit | Choose | None) -> None:
        if isinstance(step, Choose):
            self.network.ready(self, step.sequence)
        elif step is not None:
            self.network.commit(self, step.choice)

    def answered(self, call: Call, answer: Reply) -> None:
        if self._calls.get(call.shard_index) is not call:
            return
        reply = reply_of(answer)
        if self._successor is not None:
            self._note_outcome(call, reply.outcome)
            return
        self.core.check(call.shard_index, reply)
        own = self.pushes[call.push.sequence]
        own.answers[call.shard_index] = reply
        del self._calls[call.shard_index]
        if self._calls or self.stage is not Stage.PUSHING:
            return
        replies = [own.answers[index] for index in sorted(own.answers)]
        concluded = self.core.conclude(call.push.sequence, replies)
        self._open = None
        if isinstance(concluded, Missed):
            own.outcome = "dropped"
            self.stage = Stage.PULLING
            self._missed = concluded
            self._catch_up(concluded)
        else:
            own.outcome = worst_outcome({reply.outcome for reply in replies})
            self.core.acknowledge(call.push.sequence)
            self.stage = Stage.READY

    def is_calling(self, shard_index: int) -> bool:
        return shard_index in self._calls

    def call_broken(self, shard_index: int) -> None:
        """A call that carries a push has ended, nobody knows how.

        Sometimes its step has timed out, and the script steps again.
        """
        call, push = self._calls[shard_index], self._open
        if push is None or self.stage is not Stage.PUSHING:
            return
        if self.network.rng.random() < 0.3:
            self._send(shard_index, push.begin())
        elif push.failed(shard_index, None, is_retryable=True) is not None:
            self.network.ask_session(self, call)

    def lead_anew(self) -> None:
        """The next leader of a host group goes on with the push of the lost one."""
        own = self.pushes[self.sequence + 1]
        own.answers.clear()
        self._begin_sending(own, asks_first=True)

    def found(self, call: Call, session: ShardSession) -> None:
        """A shard says what it has of this worker's pushes."""
        is_open = self._calls.get(call.shard_index) is call
        if is_open and self._open is not None and not self.is_gone:
            self._send(call.shard_index, self._open.found(call.shard_index, session))

    def outcome_of(self, own: OwnPush) -> Outcome | None:
        """What the worker was told became of a push, None if nothing."""
        outcome = own.outcome.replace("duplicate", "applied")
        return Outcome[outcome.upper()] if outcome else None

    @property
    def acknowledged(self) -> list[OwnPush]:
        """Pushes that every shard has answered."""
        return [
            own for own in self.pushes.values() if own.push.sequence <= self.sequence
        ]

    # Inside

    def _pull(self, pull: Pull) -> None:
        self.stage = Stage.PULLING
        self.pull_number += 1
        self._pulled.clear()
        self.network.pull(self, pull)

    def _catch_up(self, missed: Missed) -> None:
        """Pulls what was missed, as soon as the record is here."""
        pull = self.core.catch_up(missed)
        if pull is not None:
            self._missed = None
            self._pull(pull)

    def _push(
        self, *, weight: float, is_empty: bool = False, loads_state: bool = False
    ) -> None:
        rng = self.network.rng
        place = self.core.next_push()
        publishes = not is_empty and self.network.publishes_at(place.sequence)
        if publishes:
            weight = 1.0
        is_finite = is_empty or publishes or rng.random() < 0.85
        push = PushId(self.key, place.sequence)
        continues_batch = not is_empty and self._continues_batch()
        ranges = () if is_empty or continues_batch else self.network.draw(self)
        slack_ms, is_last = None, False
        if self.core.has_quorum:
            slack_ms = rng.choice((None, 0, 10, 200))
            is_last = rng.random() < 0.1
        trailers = {
            shard_index: Trailer(
                optimizer="optimizer",
                weight=weight,
                hyperparameters=settings_of(push),
                finite=is_finite,
                loads_state=loads_state,
                is_of_longest=place.is_of_longest,
                spec_digest=self.spec_digest,
                chunk_indexes=frozenset(
                    index
                    for index in chunk_indexes
                    if is_finite and not is_empty and (publishes or rng.random() < 0.8)
                ),
                ranges=ranges,
                value_entries=frozenset({0} if publishes else ()),
                publishes=publishes,
                slack_ms=slack_ms,
                is_last=is_last,
                continues_batch=continues_batch,
            )
            for shard_index, chunk_indexes in enumerate(self.network.chunks_by_shard)
        }
        own = self.pushes[push.sequence] = OwnPush(push, place, trailers)
        self.stage = Stage.PUSHING
        self._begin_sending(own, asks_first=self.core.has_quorum)

    def _begin_sending(self, own: OwnPush, *, asks_first: bool) -> None:
        self._open = self.core.open(
            own.push.sequence, [each.chunk_indexes for each in own.trailers.values()]
        )
        for shard_index in own.trailers:
            self._send(shard_index, self._open.begin(asks_first=asks_first))

    def _send(self, shard_index: int, step: Send | Ask) -> None:
        push = PushId(self.key, self.sequence + 1)
        if isinstance(step, Send):
            self._call(push, shard_index, step.held)
            return
        self._call_count += 1
        call = self._calls[shard_index] = Call(push, shard_index, self._call_count)
        self.network.ask_session(self, call)

    def _call(self, push: PushId, shard_index: int, held: frozenset[int]) -> None:
        self._call_count += 1
        call = Call(push, shard_index, self._call_count)
        self._calls[shard_index] = call
        self.network.deliver_push(self, call, held)


def reply_of(reply: Reply) -> PushReply:
    """An answer as it comes out of the wire, but for what no core reads."""
    return PushReply(
        outcome=reply.outcome,
        shard_incarnation=1,
        generation=reply.generation,
        version=reply.version,
        frontier=reply.frontier,
        clock=reply.clock,
        mode=reply.mode,
        staleness_bound=reply.staleness_bound,
        closed_sequence=reply.closed_sequence,
        nonfinite_worker_ids=reply.nonfinite_worker_ids,
        grad_norm=reply.grad_norm,
    )
