"""A whole job in one thread: real cores, drawn schedules, values that are counters.

Everything that may happen in any order is drawn from one seed: which link delivers,
which thread ends, whose turn it is, what breaks. The same seed gives the same run.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from psserver.core.coordinator import CoordinatorCore
from psserver.core.coordinator_effects import (
    Abort,
    Announce,
    CoordinatorEffect,
    DecideCut,
    EndJob,
    OrderSeed,
    Persist,
    Prepare,
    ReleaseImage,
)
from psserver.core.effects import FenceReport
from psserver.core.job_settings import JobSettings
from psserver.core.push import Reply
from psserver.core.record import FenceKind, Record, WorkerKey
from psserver.core.roster import WorkerState
from pswire.reasons import Refusal
from tests.doubles.core_values import OPTIMIZERS, SCHEMA
from tests.doubles.links import Links
from tests.doubles.simulated_shard import Call, Image, SimulatedShard
from tests.doubles.simulated_worker import SimulatedWorker, Stage

COORDINATOR = "coordinator"
QUIET_TICK_COUNT_MAX = 600
"""Ticks of 100 ms without any message after which a world counts as stuck: longer
than any time-out of the core."""


class StuckError(AssertionError):
    """Everything was delivered, and somebody waits for ever."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a reader got: one image of each shard."""

    version: int
    clock: int
    images: tuple[Image, ...]


class World:
    """One job.

    Args:
        seed: Draws the job and everything that happens to it.
        loses_workers: Whether workers may die, and give up in the middle of a step.
    """

    def __init__(self, seed: int, *, loses_workers: bool = False) -> None:
        self.rng = random.Random(seed)
        self.links = Links(self.rng)
        self.now_ms = 0
        self.records: list[Record] = []
        self.snapshots: list[Snapshot] = []
        self.lost: set[WorkerKey] = set()
        shard_count = self.rng.randint(1, 3)
        self.chunks_by_shard = tuple(
            tuple(range(3 * index, 3 * index + self.rng.randint(0, 2)))
            for index in range(shard_count)
        )
        starter_count = self.rng.randint(1, 3)
        self.core = CoordinatorCore(
            JobSettings(
                job_id="job", shard_count=shard_count, workers_min=starter_count
            )
        )
        self.shards = [
            SimulatedShard(index, chunk_indexes, self)
            for index, chunk_indexes in enumerate(self.chunks_by_shard)
        ]
        self.workers: dict[WorkerKey, SimulatedWorker] = {}
        self._loses_workers = loses_workers
        self._joiners_left = self.rng.randint(0, 3)
        self._wanted_cut_count: int | None = None
        self._quiet_tick_count = 0
        for shard in self.shards:
            self._connect(shard)
        for _ in range(starter_count):
            self._start_worker()

    def run(self) -> None:
        """Runs the job to its end, with a snapshot after everybody has left."""
        while self._joiners_left or not all(w.is_gone for w in self.workers.values()):
            self._happen(self.rng.random())
        self._want_cut()
        newest = len(self.snapshots)
        while self._wanted_cut_count is not None or len(self.snapshots) == newest:
            if self._wanted_cut_count is None:
                self._want_cut()
            self._happen(1.0)

    # What happens

    def _happen(self, draw: float) -> None:
        if draw < 0.04:
            self.rng.choice(self._mishaps())()
        elif draw < 0.08:
            self._tick(self.rng.choice((1, 20, 100)))
        elif (draw < 0.3 and self._act()) or (draw < 0.5 and self._run_thread()):
            pass
        elif self.links.deliver_one() or self._run_thread() or self._act():
            self._quiet_tick_count = 0
        else:
            self._quiet_tick_count += 1
            self._tick(100)
            if self._quiet_tick_count > QUIET_TICK_COUNT_MAX:
                raise StuckError(self.described())

    def _act(self) -> bool:
        """Some worker takes its turn."""
        able = [worker for worker in self.workers.values() if worker.may_act]
        if able:
            self.rng.choice(able).act()
        return bool(able)

    def _run_thread(self) -> bool:
        busy = [shard for shard in self.shards if shard.threads]
        if busy:
            self.rng.choice(busy).run_thread(self.rng)
        return bool(busy)

    def _tick(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        self.core.tick(self.now_ms)
        self._pump()

    def _mishaps(self) -> list[Callable[[], None]]:
        """What may go wrong now; going on is always possible."""
        found: list[Callable[[], None]] = [self._want_cut, self._break_call]
        if self._joiners_left and self.records:
            found.append(self._bring_joiner)
        if self.records:
            found.append(self._break_shard_watch)
        if all(slot.is_watching for slot in self.core.shards.slots):
            found.append(self._let_fence_expire)
        if self._loses_workers:
            found += [self._kill_worker, self._give_up_step]
        return found

    def _bring_joiner(self) -> None:
        self._joiners_left -= 1
        self._start_worker()

    def _break_call(self) -> None:
        """A call breaks in the middle; its worker asks and sends again."""
        worker = self.rng.choice(list(self.workers.values()))
        shard = self.rng.choice(self.shards)
        if not worker.is_calling(shard.index):
            return
        self.links.cut(worker.name, shard.name)
        self.links.cut(shard.name, worker.name)
        shard.hang_up(worker.key)
        self._ask_session(worker, shard)

    def _ask_session(self, worker: SimulatedWorker, shard: SimulatedShard) -> None:
        """`GetSession`; sometimes everything is sent again all the same."""

        def asked() -> None:
            push = worker.pushes[worker.sequence + 1].push
            held = shard.held(push) if self.rng.random() < 0.7 else frozenset()
            self.links.send(
                shard.name, worker.name, lambda: worker.resend(shard.index, held)
            )

        self.links.send(worker.name, shard.name, asked)

    def _break_shard_watch(self) -> None:
        """A shard's stream breaks, with events under way, and comes back."""
        shard = self.rng.choice(self.shards)
        slot = self.core.shards.slots[shard.index]
        if not slot.is_watching:
            return
        self.links.cut(COORDINATOR, shard.name)
        self.core.shard_broken(slot, self.now_ms)
        self._pump()
        self.links.send(
            f"{shard.name} again", COORDINATOR, lambda: self._connect(shard)
        )

    def _let_fence_expire(self) -> None:
        if self.core.fence is not None and self.core.fence.kind is not FenceKind.START:
            self._tick(self.core.settings.fence_timeout_ms)

    def _kill_worker(self) -> None:
        """SIGKILL: what is under way from it may or may not have arrived."""
        alive = [w for w in self.workers.values() if w.member and not w.is_gone]
        if not alive or not self.records:
            return
        worker = self.rng.choice(alive)
        self.lost.add(worker.key)
        worker.stage = Stage.GONE
        for shard in self.shards:
            if self.rng.random() < 0.5:
                self.links.cut(worker.name, shard.name)
        self.links.cut(worker.name, COORDINATOR)
        entry = self.core.roster.find(worker.key)
        assert entry is not None
        self.core.worker_broken(entry, self.now_ms)
        self._tick(self.core.settings.reconnect_grace_ms)

    def _give_up_step(self) -> None:
        """A step timed out, its user has had enough and leaves."""
        pushing = [w for w in self.workers.values() if w.stage is Stage.PUSHING]
        if pushing:
            worker = self.rng.choice(pushing)
            self.lost.add(worker.key)
            worker.stage = Stage.LEAVING
            self.leave(worker)

    # Workers

    def _start_worker(self) -> None:
        number = len(self.workers)
        entry = self.core.register_worker(
            process_id=f"process {number}",
            worker_id=f"w{number}",
            address="",
            now_ms=self.now_ms,
        )
        worker = SimulatedWorker(entry.worker, self, self.rng.randint(1, 6))
        self.workers[entry.worker] = worker

        def joined() -> None:
            self.core.worker_watching(entry, self.now_ms)
            self.core.join(
                entry,
                schema=SCHEMA,
                optimizers=OPTIMIZERS,
                loaders=(),
                now_ms=self.now_ms,
            )
            self._pump()

        self.links.send(worker.name, COORDINATOR, joined)

    def pull(self, worker: SimulatedWorker, clock: int) -> None:
        """Asks every shard to say when it has reached a clock."""
        for shard in self.shards:
            self._pull_one(worker, shard, clock, worker.generation)

    def _pull_one(
        self,
        worker: SimulatedWorker,
        shard: SimulatedShard,
        clock: int,
        generation: int,
    ) -> None:
        def reached() -> bool:
            if not shard.knows(generation) or shard.core.clocks.applied_clock < clock:
                return False
            self.links.send(shard.name, worker.name, lambda: worker.pulled(shard.index))
            return True

        self.links.send(worker.name, shard.name, reached)

    def deliver_push(
        self, worker: SimulatedWorker, call: Call, skip: frozenset[int]
    ) -> None:
        """Sends a push to a shard, without the chunks it has."""
        shard = self.shards[call.shard_index]
        own = worker.pushes[call.push.sequence]
        trailer = own.trailers[call.shard_index]
        chunks = [index for index in trailer.chunk_indexes if index not in skip]
        parts: list[int] = [*chunks, *chunks[: self.rng.randint(0, 1)]]
        self.rng.shuffle(parts)
        generation = worker.generation

        def send(what: Callable[[], bool | None]) -> None:
            self.links.send(worker.name, shard.name, what)

        lowest = call.push.sequence
        send(lambda: shard.begin(call, own.clock, generation, lowest))
        is_first = self.rng.random() < 0.7
        if is_first:
            send(lambda: shard.take(call, trailer))
        for index in parts:
            send(lambda index=index: shard.take(call, index))  # type: ignore[misc]
        if not is_first:
            send(lambda: shard.take(call, trailer))

    def await_contribution(self, worker: SimulatedWorker) -> None:
        """Tells shard 0 that there is no data for the next clock."""
        shard, clock = self.shards[0], worker.clock + 1

        def told() -> None:
            if worker.stage is Stage.IDLE and worker.clock + 1 == clock:
                shard.core.await_contribution(worker.key, clock, self.now_ms)
                shard.pump()

        self.links.send(worker.name, shard.name, told)

    def withdraw_awaiting(self, worker: SimulatedWorker) -> None:
        """There is data after all."""
        shard = self.shards[0]
        self.links.send(
            worker.name,
            shard.name,
            lambda: shard.core.withdraw_awaiting(worker.key),
        )

    def leave(self, worker: SimulatedWorker) -> None:
        """Asks to leave; gone when the record is written."""
        entry = self.core.roster.find(worker.key)
        assert entry is not None

        def left() -> None:
            if entry.state in (WorkerState.MEMBER, WorkerState.SUSPECT):
                self.core.leave(
                    entry, sequence=worker.sequence, consumed=(), now_ms=self.now_ms
                )
                self._pump()

        self.links.send(worker.name, COORDINATOR, left)

    # Shards, as `Surroundings`

    def answer(self, call: Call, reply: Reply) -> None:
        """The answer to a call is on its way."""
        worker = self.workers[call.push.worker]
        shard = self.shards[call.shard_index]
        self.links.send(shard.name, worker.name, lambda: worker.answered(call, reply))

    def refuse(self, call: Call, refusal: Refusal) -> None:
        """Nobody but a lost worker is ever refused."""
        assert call.push.worker in self.lost, str(refusal)

    def ask(self, worker: WorkerKey, clock: int) -> None:
        """A worker without data is asked for its part of a clock."""
        asked = self.workers[worker]
        self.links.send(self.shards[0].name, asked.name, lambda: asked.asked(clock))

    def report(self, shard_index: int, report: FenceReport) -> None:
        """Reports are sent until they are taken: they are late, never lost."""

        def taken() -> None:
            slot = self.core.shards.slots[shard_index]
            self.core.report_fence(slot, report, self.now_ms)
            self._pump()

        self.links.send(self.shards[shard_index].name, COORDINATOR, taken)

    def report_image(self, shard_index: int, snapshot_id: int) -> None:
        """As `report`."""

        def taken() -> None:
            slot = self.core.shards.slots[shard_index]
            self.core.report_cut(slot, snapshot_id, "", self.now_ms)
            self._pump()

        self.links.send(self.shards[shard_index].name, COORDINATOR, taken)

    # The coordinator

    def _want_cut(self) -> None:
        if self.records and self._wanted_cut_count is None:
            self._wanted_cut_count = self.core.want_cut(self.now_ms)
            self._pump()

    def _connect(self, shard: SimulatedShard) -> None:
        """A shard's watch begins, with the whole current state."""
        slot = self.core.register_shard(
            process_id=shard.name, address=shard.name, now_ms=self.now_ms
        )
        fence = self.core.fence
        is_asked = fence is not None and slot.index not in fence.reports
        self.core.shard_watching(slot, self.now_ms)
        if self.records:
            newest, closed = self.records[-1], self.core.fence_closed_number
            self._tell(shard, lambda: shard.install(newest, closed))
        if fence is not None and is_asked:
            self._tell_effect(
                shard,
                Prepare(
                    fence_number=fence.number, kind=fence.kind, seeder=fence.seeder
                ),
            )
        for snapshot_id in self.core.snapshots.released:
            self._tell_effect(shard, ReleaseImage(snapshot_id=snapshot_id))
        self._pump()

    def _pump(self) -> None:
        for effect in self.core.take_effects():
            self._carry_out(effect)
        self._read_if_ready()

    def _carry_out(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Persist():
                self.records.append(effect.record)
            case Announce():
                self._announce(effect.record)
            case Prepare() | Abort() | DecideCut() | ReleaseImage():
                for shard in self.shards:
                    if self.core.shards.slots[shard.index].is_watching:
                        self._tell_effect(shard, effect)
            case OrderSeed():
                self._seed(effect)
            case EndJob():
                raise AssertionError(effect.reason)

    def _announce(self, record: Record) -> None:
        assert record is self.records[-1]
        for shard in self.shards:
            if self.core.shards.slots[shard.index].is_watching:
                self._tell(shard, lambda shard=shard: shard.install(record))  # type: ignore[misc]
        for worker in self.workers.values():
            self.links.send(
                COORDINATOR,
                worker.name,
                lambda worker=worker: worker.heard(record),  # type: ignore[misc]
            )
        for end in record.departures:
            self.workers[end.member.worker].stage = Stage.GONE

    def _tell(self, shard: SimulatedShard, what: Callable[[], None]) -> None:
        self.links.send(COORDINATOR, shard.name, what)

    def _tell_effect(self, shard: SimulatedShard, effect: CoordinatorEffect) -> None:
        def told() -> None:
            match effect:
                case Prepare():
                    shard.core.prepare_fence(
                        effect.fence_number, effect.kind, effect.seeder
                    )
                case Abort():
                    shard.core.abort_fence(effect.fence_number)
                case DecideCut():
                    shard.core.decide_cut(
                        effect.fence_number, effect.snapshot_id, effect.clock
                    )
                case ReleaseImage():
                    shard.release(effect.snapshot_id)
            shard.pump()

        self._tell(shard, told)

    def _seed(self, order: OrderSeed) -> None:
        for shard in self.shards:
            for index in shard.chunk_indexes:

                def staged(shard: SimulatedShard = shard, index: int = index) -> bool:
                    if not shard.core.is_seeding(order.fence_number):
                        return False
                    shard.core.check_seeder(order.worker, order.fence_number)
                    shard.core.seed_chunk_staged(index)
                    shard.pump()
                    return True

                self.links.send(str(order.worker), shard.name, staged)

    def _read_if_ready(self) -> None:
        """A reader that waits takes its images; shards are read at once."""
        snapshots = self.core.snapshots
        wanted = self._wanted_cut_count
        if wanted is None or snapshots.finished_cut_count < wanted:
            return
        self._wanted_cut_count = None
        newest = snapshots.newest
        if snapshots.failure or newest is None:
            return
        images = tuple(shard.images[newest.snapshot_id] for shard in self.shards)
        self.snapshots.append(Snapshot(newest.version, newest.clock, images))

    def described(self) -> str:
        """Where everybody stands, for a person who debugs."""
        workers = ", ".join(
            f"{w.name} {w.stage.value} at {w.member and w.clock}"
            for w in self.workers.values()
        )
        shards = "; ".join(
            f"{s.name} at {s.core.clocks.applied_clock} waits for "
            f"{s.core.waiting_reason} from {s.core.awaited(0)}"
            for s in self.shards
        )
        return f"workers: {workers}\nshards: {shards}\nlinks: {self.links}"
