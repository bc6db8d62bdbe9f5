"""Eight learners that fail all the time: what mode quorum makes of their work.

The protocol is the real one: a `MemberCore` for each learner and a `ShardCore` for each
shard, driven with injected time; merges are made by the shards' own weighted mean and
torch's optimizer. Assumed is the world around them:

- A learner takes a local step each 0.8 to 1.4 s, on 16 images of 8 x 8 pixels (a
  linear classifier, at a rate that falls to 2 %). It is up for 5 minutes on average,
  and down for 10 to 40 % of the time, both drawn from exponential distributions: the
  failures of Decoupled DiLoCo's experiments are of this order. A message takes 100 ms.
- Who comes back has lost what it trained since its last push, and begins at the newest
  anchor. It keeps its place in the job meanwhile: nobody is evicted.
- *Possible* is what learners could compute while they were up, *useful* is what was
  merged. So the time that is lost to outages themselves counts for neither.
- In mode quorum learners push each 8 local steps and go on without waiting. In BSP they
  push gradients at each step, so that all stop for the whole recovery of one.

Source of the figures to compare with: Decoupled DiLoCo, arXiv 2604.21428 (goodput 88 %
where data parallel training has 27 %).
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from psserver.shard.core.effects import (
    ApplyChunk,
    ClockClosed,
    Finish,
    Staged,
    WakeAt,
)
from psserver.shard.core.push import PushId, Reply, StagedChunk, Trailer
from psserver.shard.core.quorum import Merge
from psserver.shard.core.shard import ShardCore
from psserver.shard.core.shard_state import ShardRules
from psserver.shard.tensors.aggregate import weighted_mean
from psserver.shard.tensors.contribution import Contribution
from pswire.membership import (
    ClockChoice,
    FenceKind,
    Member,
    Mode,
    ModeTerms,
    Record,
    WorkerKey,
)
from pswire.placement import Chunk, Slice
from pswire.schema import ElementType
from psworker.member.core import Choose, Commit, MemberCore, Missed, OpenPush, Settled
from psworker.transport.values import PushReply, ShardSession
from tests.doubles.driven_worker import reply_of

LEARNER_COUNT = 8
SHARD_COUNT = 2
LATENCY_MS = 100
BATCH = 16
UP_MS = 300_000
QUORUM = ModeTerms(Mode.QUORUM, quorum=4, grace_window_ms=1_500)
DIGITS = load_digits()
IMAGES = torch.tensor(DIGITS.data / 16, dtype=torch.float32)
CLASSES = torch.tensor(DIGITS.target)
SHAPE = (10, IMAGES.shape[1])
RATE, DECAY = 0.5, 1e-2
DURATION_MS = 1_800_000


def rate_at(progress: float) -> float:
    """The learning rate, which falls as usual: what is left of noise is no difference.

    Args:
        progress: Share of the training that is over.
    """
    return RATE * max(0.02, 1 - progress)


def loss_of(
    values: Tensor, images: Tensor = IMAGES, classes: Tensor = CLASSES
) -> float:
    """The loss that is trained, decay included."""
    found = cross_entropy(images @ values.view(SHAPE).T, classes)
    return float(found + DECAY / 2 * values.square().sum())


def gradient_of(values: Tensor, chosen: Tensor) -> Tensor:
    """The gradient of the loss of a batch, worked out by hand: 3 times as fast."""
    images = IMAGES[chosen]
    errors = torch.softmax(images @ values.view(SHAPE).T, 1)
    errors[torch.arange(BATCH), CLASSES[chosen]] -= 1
    return (errors.T @ images / BATCH).flatten() + DECAY * values


class SimulatedShard:
    """A shard: the real core, with half of the model."""

    def __init__(self, world: "World", index: int, size: int) -> None:
        rules = ShardRules(is_first=index == 0, shard_index=index)
        self.core = ShardCore([index], rules)
        self.values = torch.zeros(size)
        self.merges: list[Merge] = []
        self._world = world
        self._index = index
        self._chunk = Chunk(
            index=index,
            shard_index=index,
            element_type=ElementType.FLOAT32,
            slices=(Slice(0, 0, size),),
            vector_start=0,
        )
        self._values = torch.nn.Parameter(self.values)
        self._optimizer = world.outer([self._values])
        self.core.install_record(world.record)
        self.core.take_effects()

    def take(self, push: PushId, trailer: Trailer, clock: int, part: Tensor) -> None:
        """A whole push, or one that was done before."""
        now_ms = self._world.now_ms
        entry = self.core.open_push(push, clock, now_ms, generation=1)
        self.core.acknowledge(push.worker, push.sequence)
        reply = self.core.reply_to(push)
        if reply is not None:
            self._answer(push, reply)
        elif entry is not None:
            self.core.add_trailer(push, entry, trailer)
            chunk = StagedChunk(digest=1, presence=(True,), payload=part)
            self.core.add_chunk(push, entry, self._index, chunk)
        self.pump()

    def session(self, worker: WorkerKey) -> ShardSession:
        """What it has of a worker's pushes."""
        return ShardSession(self.core.closed_sequence(worker), {})

    def pump(self) -> None:
        """Carries out what the core wants done."""
        while effects := self.core.take_effects():
            for effect in effects:
                match effect:
                    case ApplyChunk():
                        self._apply(effect)
                    case Finish():
                        self._answer(effect.push, effect.reply)
                    case Staged(push=push, choice=choice):
                        self._world.tell(push.worker, "staged", self._index, choice)
                    case WakeAt(at_ms=at_ms):
                        self._world.at(at_ms, self._wake)
                    case ClockClosed(merge=merge):
                        self.merges.append(merge)

    def _wake(self) -> None:
        self.core.wake(self._world.now_ms)
        self.pump()

    def _answer(self, push: PushId, reply: Reply) -> None:
        values = self.values.clone()
        self._world.tell(push.worker, "answered", push, self._index, reply, values)

    def _apply(self, order: ApplyChunk) -> None:
        parts = [
            Contribution(
                worker_id=part.worker_id,
                weight=part.weight,
                presence=part.presence,
                data=memoryview(part.payload.numpy()).cast("B"),  # type: ignore[attr-defined]
            )
            for part in order.contributions
        ]
        gradient, _ = weighted_mean(self._chunk, parts, order.total_weight)
        self._values.grad = gradient
        self._optimizer.step()
        self.core.chunk_applied(order.chunk_index)


@dataclass
class Sending:
    """A push that is under way.

    Attributes:
        push: Which one.
        clock: Its clock.
        samples: Behind it.
        steps: Local steps behind it.
        pushed: What was pushed.
        local: What its learner had by then; None once it has lost that.
        open: What follows from the answers.
    """

    push: PushId
    clock: int
    samples: int
    steps: int
    pushed: Tensor
    local: Tensor | None
    open: OpenPush
    answers: dict[int, tuple[PushReply, Tensor]] = field(default_factory=dict)


class Learner:
    """A learner, which fails now and then."""

    def __init__(self, world: "World", index: int, rng: random.Random) -> None:
        self.key = WorkerKey(f"w{index}", 1)
        self.core = MemberCore(self.key)
        self.core.take_record(world.record)
        self.core.view_count = 1
        self._world = world
        self._rng = rng
        self._step_ms = rng.randint(800, 1_400)
        self._down_share = 0.1 + 0.3 * index / (LEARNER_COUNT - 1)
        self._draws = torch.Generator().manual_seed(index)
        self._size = [part.numel() for part in world.split(world.start)]
        self.is_up = True
        self.anchor = self.local = world.start.clone()
        self.steps = 0
        self.sending: Sending | None = None
        self.useful = self.possible = 0
        self._life = 0
        self._was_missed = False
        world.at(rng.randint(0, 1_000), self._step, 0)
        world.at(self._drawn(UP_MS), self._fail)

    def _drawn(self, mean_ms: float) -> int:
        return self._world.now_ms + 1 + round(self._rng.expovariate(1 / mean_ms))

    # Outages

    def _fail(self) -> None:
        self.is_up = False
        self._life += 1
        down_ms = UP_MS * self._down_share / (1 - self._down_share)
        self._world.at(self._drawn(down_ms), self._return)

    def _return(self) -> None:
        """It comes back without what it had, and asks what became of its push."""
        self.is_up = True
        self._world.at(self._drawn(UP_MS), self._fail)
        self.anchor = self.local = self._world.values()
        self.steps = 0
        if self.sending is not None:
            self.sending.local = None
            self._ask()
        self._world.at(self._world.now_ms + self._step_ms, self._step, self._life)

    # Training

    def _step(self, life: int) -> None:
        if life != self._life:
            return
        world = self._world
        self.possible += BATCH
        world.at(world.now_ms + self._step_ms, self._step, life)
        if world.is_bsp and self.sending is not None:
            return  # it waits for the others
        chosen = torch.randint(len(IMAGES), (BATCH,), generator=self._draws)
        gradient = gradient_of(self.local, chosen)
        self.steps += 1
        if world.is_bsp:
            self._send(gradient)
            return
        self.local = self.local - rate_at(world.now_ms / DURATION_MS) * gradient
        is_due = self.steps >= world.every or self._was_missed
        if is_due and self.sending is None:
            self._send(self.anchor - self.local)

    def _send(self, pushed: Tensor) -> None:
        place = self.core.next_push()
        push = PushId(self.key, place.sequence)
        chunks = [{index} for index in range(SHARD_COUNT)]
        self._was_missed = False
        self.sending = Sending(
            push=push,
            clock=place.clock,
            samples=self.steps * BATCH,
            steps=self.steps,
            pushed=pushed,
            local=self.local,
            open=self.core.open(place.sequence, chunks),
        )
        self._ask()

    def _ask(self) -> None:
        """As real ones: who is late sends no bytes in vain."""
        for index, shard in enumerate(self._world.shards):

            def asked(index: int = index, shard: SimulatedShard = shard) -> None:
                self._world.tell(self.key, "found", index, shard.session(self.key))

            self._world.later(asked)

    def found(self, index: int, session: ShardSession) -> None:
        """A shard says what it has of this learner's pushes."""
        sending = self.sending
        if sending is None or index in sending.answers:
            return
        sending.open.found(index, session)
        weight = 1.0
        if not self._world.is_bsp:
            weight = sending.samples * sending.samples / sending.steps
        trailer = Trailer(
            optimizer="outer",
            weight=weight,
            chunk_indexes=frozenset((index,)),
            slack_ms=self._world.every * self._step_ms,
        )
        part = self._world.split(sending.pushed)[index].contiguous()
        shard = self._world.shards[index]
        push, clock = sending.push, sending.clock
        self._world.later(lambda: shard.take(push, trailer, clock, part))

    def staged(self, index: int, choice: ClockChoice) -> None:
        """A shard has all of this learner's push."""
        if self.sending is not None:
            self._carry_out(self.sending.open.staged(index, choice))

    def chosen(self, push: PushId, choice: ClockChoice) -> None:
        """Shard 0 says which pushes count."""
        if self.sending is not None and self.sending.push == push:
            self._carry_out(self.sending.open.chosen(choice))

    def _carry_out(self, step: Commit | Choose | None) -> None:
        if isinstance(step, Choose):
            self._world.later(self._world.ready, self.key, step.sequence)
        elif step is not None:
            self._world.later(self._world.commit, self.key, step.choice)

    def answered(self, push: PushId, index: int, reply: Reply, values: Tensor) -> None:
        """A shard has done with a push."""
        sending = self.sending
        if sending is None or sending.push != push:
            return
        answer = reply_of(reply)
        self.core.check(index, answer)
        sending.answers[index] = answer, values
        if len(sending.answers) < SHARD_COUNT:
            return
        self.sending = None
        answers = [sending.answers[index] for index in range(SHARD_COUNT)]
        done = self.core.conclude(push.sequence, [each for each, _ in answers])
        anchor = torch.cat([part for _, part in answers])
        match done:
            case Settled():
                self.core.acknowledge(push.sequence)
                self.useful += sending.samples
                if sending.local is not None:
                    self.local = anchor + (self.local - sending.local)
                    self.steps -= sending.steps
                    self.anchor = anchor
            case Missed():
                assert self.core.catch_up(done) is not None
                anchor = self._world.values()
                self.local = anchor + (self.local - self.anchor)
                self.anchor = anchor
                self._was_missed = True


class World:
    """A job in simulated time.

    Attributes:
        terms: Its mode.
        every: Local steps of a round.
    """

    def __init__(self, seed: int, terms: ModeTerms, every: int) -> None:
        self.now_ms = 0
        self.is_bsp = terms.mode is Mode.BSP
        self.every = every
        self._events: list[
            tuple[int, int, Callable[..., None], tuple[object, ...]]
        ] = []
        self._numbers = count()
        self._asking: list[PushId] = []
        self.start = torch.zeros(SHAPE).flatten()
        self.record = Record(
            fence_number=1,
            generation=1,
            kind=FenceKind.START,
            members=tuple(
                Member(worker=WorkerKey(f"w{rank}", 1), rank=rank, base_clock=0)
                for rank in range(LEARNER_COUNT)
            ),
            mode=terms.mode,
            quorum=terms.quorum,
            grace_window_ms=terms.grace_window_ms,
        )
        sizes = [part.numel() for part in self.split(self.start)]
        self.shards = [SimulatedShard(self, i, size) for i, size in enumerate(sizes)]
        rng = random.Random(seed)
        self.learners = {
            learner.key: learner
            for learner in (
                Learner(self, index, random.Random(rng.random()))
                for index in range(LEARNER_COUNT)
            )
        }

    def run(self, duration_ms: int) -> None:
        """Lets time pass."""
        while self._events and self._events[0][0] <= duration_ms:
            self.now_ms, _, act, args = heapq.heappop(self._events)
            act(*args)
            self._answer_ready()

    @property
    def goodput(self) -> float:
        """Useful samples over possible ones."""
        learners = self.learners.values()
        return sum(w.useful for w in learners) / sum(w.possible for w in learners)

    def outer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """What shards do with a merge: DiLoCo's, or the script's own."""
        if self.is_bsp:
            return torch.optim.SGD(parameters, lr=RATE)
        return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)

    def split(self, values: Tensor) -> tuple[Tensor, ...]:
        """The parts of both shards."""
        return values.tensor_split(SHARD_COUNT)

    def values(self) -> Tensor:
        """The newest values."""
        return torch.cat([shard.values for shard in self.shards])

    # Messages, each of which takes a while; one to a learner that is down is lost

    def at(self, at_ms: int, act: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (at_ms, next(self._numbers), act, args))

    def later(self, act: Callable[..., None], *args: object) -> None:
        self.at(self.now_ms + LATENCY_MS, act, *args)

    def tell(self, worker: WorkerKey, what: str, *args: object) -> None:
        learner = self.learners[worker]

        def arrive() -> None:
            if learner.is_up:
                getattr(learner, what)(*args)

        self.later(arrive)

    def ready(self, worker: WorkerKey, sequence: int) -> None:
        """Every shard holds all of a push; its learner hears who counts."""
        shard = self.shards[0]
        shard.core.ready(worker, sequence, self.now_ms)
        shard.pump()
        self._asking.append(PushId(worker, sequence))

    def _answer_ready(self) -> None:
        for push in list(self._asking):
            choice = self.shards[0].core.choice_for(*push)
            if choice is not None:
                self._asking.remove(push)
                self.tell(push.worker, "chosen", push, choice)

    def commit(self, worker: WorkerKey, choice: ClockChoice) -> None:
        """A learner commits a clock on every shard."""
        for shard in self.shards:
            shard.core.commit(worker, choice)
            shard.pump()


def check_windows(merges: Sequence[Merge]) -> None:
    """Each clock closed at the moment that its quorum, window and slacks say."""
    for merge in merges:
        times = sorted(arrival.at_ms for arrival in merge.arrivals)
        assert merge.quorum <= len(times) <= merge.active_count == LEARNER_COUNT
        closes_ms = times[merge.quorum - 1] + merge.window_ms
        for arrival in merge.arrivals:
            assert arrival.slack_ms is not None
            closes_ms = min(closes_ms, arrival.at_ms + arrival.slack_ms)
        if len(times) == LEARNER_COUNT:
            closes_ms = times[-1]
        assert merge.closed_ms == max(closes_ms, times[merge.quorum - 1])


def synchronous_loss(sample_count: int) -> float:
    """The loss of synchronous training after so many samples, without failures."""
    values, draws = torch.zeros(SHAPE).flatten(), torch.Generator().manual_seed(99)
    step_count = sample_count // (LEARNER_COUNT * BATCH)
    for step in range(step_count):
        gradients = [
            gradient_of(values, torch.randint(len(IMAGES), (BATCH,), generator=draws))
            for _ in range(LEARNER_COUNT)
        ]
        values = values - rate_at(step / step_count) * torch.stack(gradients).mean(0)
    return loss_of(values)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.repeat) for seed in range(1, 8))]
)
def test_learners_that_fail_all_the_time_lose_little_in_mode_quorum(seed: int) -> None:
    world = World(seed, QUORUM, every=8)
    world.run(DURATION_MS)
    check_windows(world.shards[0].merges)
    assert world.goodput >= 0.85, world.goodput
    useful = sum(learner.useful for learner in world.learners.values())
    own, synchronous = loss_of(world.values()), synchronous_loss(useful)
    assert abs(own / synchronous - 1) < 0.02, (own, synchronous)

    bsp = World(seed, ModeTerms(Mode.BSP), every=1)
    bsp.run(DURATION_MS)
    assert 0 < bsp.goodput < 0.4, bsp.goodput
    print(
        f"seed {seed}: goodput {world.goodput:.3f}, in BSP {bsp.goodput:.3f}; loss "
        f"{own:.4f}, of synchronous training {synchronous:.4f}"
    )
