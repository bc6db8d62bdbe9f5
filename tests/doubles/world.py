"""A whole job in one thread: real cores, drawn schedules, values that are counters.

Everything that may happen in any order is drawn from one seed: which link delivers,
which thread ends, whose turn it is, what breaks. The same seed gives the same run.
"""

import random
from collections.abc import Callable

from psserver.core.effects import FenceReport
from psserver.core.job_settings import JobSettings
from psserver.core.push import Reply
from psserver.core.record import FenceKind, WorkerKey
from pswire.reasons import Refusal
from tests.doubles.links import Links
from tests.doubles.simulated_coordinator import COORDINATOR, SimulatedCoordinator
from tests.doubles.simulated_shard import Call, SimulatedShard
from tests.doubles.simulated_worker import SimulatedWorker, Stage

QUIET_TICK_COUNT_MAX = 600
"""Ticks of 100 ms without any message after which a world counts as stuck: longer
than any time-out of the core."""


class StuckError(AssertionError):
    """Everything was delivered, and somebody waits for ever."""


class World:
    """One job.

    Args:
        seed: Draws the job and everything that happens to it.
        loses_workers: Whether workers may die, and give up in the middle of a step.
        restarts_coordinator: Whether the coordinator may be started again.

    Attributes:
        coordinator: The coordinator.
        shards: All shards.
        workers: All starts of all workers.
        lost: Those that died or gave up.
    """

    def __init__(
        self,
        seed: int,
        *,
        loses_workers: bool = False,
        restarts_coordinator: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.links = Links(self.rng)
        self.lost: set[WorkerKey] = set()
        self.workers: dict[WorkerKey, SimulatedWorker] = {}
        shard_count = self.rng.randint(1, 3)
        self.chunks_by_shard = tuple(
            tuple(range(3 * index, 3 * index + self.rng.randint(0, 2)))
            for index in range(shard_count)
        )
        self.shards = [
            SimulatedShard(index, chunk_indexes, self)
            for index, chunk_indexes in enumerate(self.chunks_by_shard)
        ]
        starter_count = self.rng.randint(1, 3)
        settings = JobSettings(
            job_id="job", shard_count=shard_count, workers_min=starter_count
        )
        self.coordinator = SimulatedCoordinator(
            settings, self.links, self.shards, self.rng
        )
        self._loses_workers = loses_workers
        self._restarts_left = self.rng.randint(0, 3) if restarts_coordinator else 0
        self._joiners_left = self.rng.randint(0, 3)
        self._quiet_tick_count = 0
        for _ in range(starter_count):
            self._start_worker()

    def run(self) -> None:
        """Runs the job to its end, with a snapshot after everybody has left."""
        while not self._is_over:
            self._happen(self.rng.random())
        self._restarts_left = 0
        self.coordinator.slow_read_share = 0.0
        self._settle()
        known = len(self.coordinator.snapshots)
        while len(self.coordinator.snapshots) == known:
            self.coordinator.want_cut()
            self._happen(1.0)
        self._settle()

    @property
    def _is_over(self) -> bool:
        if self._joiners_left or self.coordinator.has_members:
            return False
        return all(worker.is_gone for worker in self.workers.values())

    # What happens

    def _happen(self, draw: float) -> None:
        if draw < 0.04:
            self.rng.choice(self._mishaps())()
        elif draw < 0.08:
            self.coordinator.tick(self.rng.choice((1, 20, 100)))
        elif (draw < 0.3 and self._act()) or (draw < 0.5 and self._run_thread()):
            pass
        elif self.links.deliver_one() or self._run_thread() or self._act():
            self._quiet_tick_count = 0
        else:
            self._quiet_tick_count += 1
            self.coordinator.tick(100)
            if self._quiet_tick_count > QUIET_TICK_COUNT_MAX:
                raise StuckError(self.described())

    def _settle(self) -> None:
        """Lets all that is under way arrive, and a while pass."""
        for _ in range(3):
            while self.links.deliver_one() or self._run_thread():
                pass
            self.coordinator.tick(100)

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

    def _mishaps(self) -> list[Callable[[], None]]:
        """What may go wrong now; going on is always possible."""
        found: list[Callable[[], None]] = [
            self.coordinator.want_cut,
            self._break_call,
        ]
        if self.coordinator.records:
            found.append(self._break_shard_watch)
        if self._joiners_left and self.coordinator.records:
            found.append(self._bring_joiner)
        if all(slot.is_watching for slot in self.coordinator.core.shards.slots):
            found.append(self._let_fence_expire)
            if self._restarts_left:
                found.append(self._restart_coordinator)
        if self._loses_workers and self.coordinator.records:
            found += [self._kill_worker, self._give_up_step]
        return found

    def _bring_joiner(self) -> None:
        self._joiners_left -= 1
        self._start_worker()

    def _break_call(self) -> None:
        """A call breaks in the middle; its worker asks and sends again."""
        worker = self.rng.choice(list(self.workers.values()))
        shard = self.rng.choice(self.shards)
        if not worker.is_calling(shard.index) or worker.is_gone:
            return
        self.links.cut(worker.name, shard.name)
        self.links.cut(shard.name, worker.name)
        shard.hang_up(worker.key)

        def asked() -> None:
            """`GetSession`; sometimes everything is sent again all the same."""
            push = worker.pushes[worker.sequence + 1].push
            held = shard.held(push) if self.rng.random() < 0.7 else frozenset()
            self.links.send(
                shard.name, worker.name, lambda: worker.resend(shard.index, held)
            )

        self.links.send(worker.name, shard.name, asked)

    def _break_shard_watch(self) -> None:
        self.coordinator.break_shard(self.rng.choice(self.shards))

    def _restart_coordinator(self) -> None:
        self._restarts_left -= 1
        for _ in self.coordinator.restart():
            self._start_worker()

    def _let_fence_expire(self) -> None:
        fence = self.coordinator.core.fence
        if fence is not None and fence.kind is not FenceKind.START:
            self.coordinator.tick(self.coordinator.core.settings.fence_timeout_ms)

    def _kill_worker(self) -> None:
        """SIGKILL: what is under way from it may or may not have arrived."""
        alive = [worker for worker in self.workers.values() if not worker.is_gone]
        if not alive:
            return
        worker = self.rng.choice(alive)
        self.lost.add(worker.key)
        worker.stage = Stage.GONE
        for shard in self.shards:
            if self.rng.random() < 0.5:
                self.links.cut(worker.name, shard.name)
        self.links.cut(worker.name, COORDINATOR)
        self.coordinator.lose(worker)

    def _give_up_step(self) -> None:
        """A step timed out, its user has had enough and leaves."""
        pushing = [w for w in self.workers.values() if w.stage is Stage.PUSHING]
        if pushing:
            worker = self.rng.choice(pushing)
            self.lost.add(worker.key)
            worker.stage = Stage.LEAVING
            self.leave(worker)

    # Workers, as `Network`

    def _start_worker(self) -> None:
        worker_id = self.coordinator.draw_id()
        worker_key = self.coordinator.register(worker_id, len(self.workers))
        worker = SimulatedWorker(worker_key, self, self.rng.randint(1, 6))
        self.workers[worker_key] = worker
        self.coordinator.admit(worker)

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
                return worker.is_gone
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
                now_ms = self.coordinator.now_ms
                shard.core.await_contribution(worker.key, clock, now_ms)
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
        self.coordinator.leave(worker)

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
        self.links.send(
            self.shards[shard_index].name,
            COORDINATOR,
            lambda: self.coordinator.report(shard_index, report),
        )

    def report_image(self, shard_index: int, snapshot_id: int) -> None:
        """As `report`."""
        self.links.send(
            self.shards[shard_index].name,
            COORDINATOR,
            lambda: self.coordinator.report_image(shard_index, snapshot_id),
        )

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
