"""A whole job in one thread: real cores, drawn schedules, values that are counters.

Everything that may happen in any order is drawn from one seed: which link delivers,
which thread ends, whose turn it is, what breaks. The same seed gives the same run.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from psserver.coordinator.core.roster import GONE
from psserver.coordinator.core.start_point import StartPoint
from psserver.coordinator.storage.saved_job import saved_job_of
from psserver.edge.cut_report import CutReport, PartReport
from psserver.edge.fence_report import FenceReport
from psserver.shard.core.push import PushId, Reply
from psserver.shard.core.shard_state import ShardRules
from pswire.checkpoint.manifest import Manifest
from pswire.checkpoint.place import CheckpointPlace
from pswire.leased_data import DataRange
from pswire.membership import (
    ClockChoice,
    LossPolicy,
    Mode,
    Outcome,
    StepAtomicity,
    WorkerKey,
    WorkerState,
)
from pswire.reasons import Refusal
from pswire.schema import OptimizerSpec
from psworker.member.core import Join, Pull
from psworker.transport.values import SeedOrder
from tests.doubles.declared_specs import FIRST, SECOND
from tests.doubles.driven_worker import DrivenWorker, OwnPush, Stage
from tests.doubles.left_over import INCARNATION_FLOOR, LeftOver
from tests.doubles.links import Links
from tests.doubles.mishaps import Mishaps
from tests.doubles.scenario import Scenario
from tests.doubles.simulated_coordinator import (
    COORDINATOR,
    Saved,
    SimulatedCoordinator,
    used_of,
)
from tests.doubles.simulated_shard import Call, SimulatedShard, Values

QUIET_TICK_COUNT_MAX = 600
"""Ticks of 100 ms without any message after which a world counts as stuck: longer
than any time-out of the core."""

EVENT_COUNT_MAX = 15_000
"""Events after which a world that is busy counts as stuck, too; most end in 1,000."""

HEAL_EVENT_COUNT = 300
"""Events after which networks and processes go on, whatever else happens."""

HELD_LEASES_MAX = 2.5
"""Leases for which a worker that can't reach a shard may hold up others who do."""

CUT_OFF_LEASES_MAX = 4
"""Leases after which people mend a network, be it that nobody has decided anything."""

HELP_TICK_COUNT = 20
"""Ticks without any message after which people do what the job waits for: they start
a worker in the place of one that is lost."""


class StuckError(AssertionError):
    """Everything was delivered, and somebody waits for ever."""


class World:
    """One job.

    Args:
        seed: Draws the job and everything that happens to it.
        scenario: What may happen.
        before: What is left of the world that the job goes on from.

    Attributes:
        before: The same.
        settings: The job.
        clip_grad_norm: Norm that it clips gradients to, 0 for no clipping.
        declares: Whether scripts change their optimizers, or load state.
        publishes: Whether scripts publish values.
        steps_again: Whether they step twice on each batch.
        may_miss: Whether a clock may close without some of its contributors.
        is_bsp: Whether it knows no other mode.
        has_bsp: Whether it knows BSP.
        is_two_phase: Whether nothing may ever be applied before a commit.
        coordinator: The coordinator.
        shards: All shards.
        workers: All starts of all workers.
        lost: Those that died, were taken out or gave up.
        event_count: What was delivered, done or broken.
    """

    def __init__(
        self, seed: int, scenario: Scenario, before: LeftOver | None = None
    ) -> None:
        self.before = before
        self.rng = random.Random(seed)
        self.links = Links(self.rng)
        self.lost: set[WorkerKey] = set()
        self.workers: dict[WorkerKey, DrivenWorker] = {}
        self.event_count = 0
        self._cut_off_ms: dict[tuple[WorkerKey, int], int] = {}
        self._held_ms: dict[tuple[WorkerKey, int], int] = {}
        shard_count = self.rng.randint(1, 3)
        self.chunks_by_shard = tuple(
            tuple(range(3 * index, 3 * index + self.rng.randint(0, 2)))
            for index in range(shard_count)
        )
        starter_count = self.rng.randint(1, 4 if scenario.has_backups else 3)
        self.settings = scenario.settings(self.rng, shard_count, starter_count)
        if before is not None:
            self.settings = replace(before.settings, shard_count=shard_count)
            starter_count = max(starter_count, self.settings.workers_min)
            places = [self.rng.randrange(shard_count) for _ in before.values]
            self.chunks_by_shard = tuple(
                tuple(
                    chunk_index
                    for chunk_index, place in zip(before.values, places, strict=True)
                    if place == index
                )
                for index in range(shard_count)
            )
        self.clip_grad_norm = scenario.clip_grad_norm
        self.declares = scenario.declares
        self.publishes = scenario.publishes
        self.steps_again = scenario.steps_again
        self.may_miss = scenario.may_miss
        self.is_bsp = scenario.modes == (Mode.BSP,)
        self.has_bsp = Mode.BSP in scenario.modes
        self.update = self.settings.update_rules(scenario.clip_grad_norm)
        self.is_two_phase = self.settings.step_atomicity is StepAtomicity.CLOCK or (
            self.is_bsp and self.update.is_measured
        )
        self.shards = [
            SimulatedShard(index, chunk_indexes, self._rules(index), self)
            for index, chunk_indexes in enumerate(self.chunks_by_shard)
        ]
        self.coordinator = SimulatedCoordinator(
            self.settings,
            self.links,
            self.shards,
            self.rng,
            self.clip_grad_norm,
            before=before,
            optimizers=(FIRST, SECOND) if scenario.steps_again else (FIRST,),
        )
        self.coordinator.loses_shards = scenario.loses_shards
        self.coordinator.end_life = lambda: self.end_life(self)
        self.coordinator.begin_again = self._begin_again
        self.end_life: Callable[[World], None] = lambda _: None
        self._returning: list[DrivenWorker] = []
        self._stopped_shards: list[SimulatedShard] = []
        self._old_shards: list[SimulatedShard] = []
        self._process_count = 0
        self._mishaps = Mishaps(self, scenario)
        self._quiet_tick_count = 0
        for _ in range(starter_count):
            self.start_worker(self.coordinator.draw_id())

    def _rules(self, shard_index: int) -> ShardRules:
        return ShardRules(
            step_atomicity=self.settings.step_atomicity,
            backup_worker_count=self.settings.backup_worker_count,
            is_first=shard_index == 0,
            shard_index=shard_index,
            shard_count=self.settings.shard_count,
            update=self.update,
        )

    def run(self) -> None:
        """Runs the job to its end, with a snapshot after everybody has left."""
        while not self._is_over:
            self._happen(self.rng.random())
            if self.event_count > EVENT_COUNT_MAX:
                raise StuckError(f"it never ends: {self.described()}")
        self._mishaps.restarts_left = 0
        self.coordinator.slow_read_share = 0.0
        self._settle()
        known = len(self.coordinator.snapshots)
        while len(self.coordinator.snapshots) == known:
            self.coordinator.want_cut()
            self._happen(1.0)
        self._settle()

    def run_until_killed(self) -> LeftOver | None:
        """Runs the job until all is killed at once; None if it had no checkpoint."""
        coordinator = self.coordinator
        coordinator.slow_read_share = 0.3
        event_count = self.rng.randint(20, 500)
        while not self._is_over and (
            self.event_count < event_count or not coordinator.snapshots
        ):
            if self.rng.random() < 0.1:
                coordinator.want_cut()
            self._happen(self.rng.random())
        if not coordinator.snapshots:
            return None
        newest = coordinator.snapshots[-1]
        values = {k: v for image in newest.images for k, v in image.values.items()}
        assert coordinator.disk.terms is not None
        is_state_lost = self.rng.random() < 0.5
        point = StartPoint(
            place=CheckpointPlace("", f"step-{newest.version:012d}"),
            clock=newest.cut.clock,
            version=newest.version,
            mode=newest.record.mode,
            staleness_bound=newest.record.staleness_bound,
            quorum=newest.record.quorum,
            grace_window_ms=newest.record.grace_window_ms,
            generation=coordinator.records[-1].generation,
            incarnation_floor=(
                self.before.point.incarnation_floor if self.before is not None else 0
            ),
        )
        left = LeftOver(
            settings=self.settings,
            point=point,
            terms=coordinator.disk.terms,
            values=dict(sorted(values.items())),
            incarnations=coordinator.disk.incarnations,
            start_count=coordinator.start_count + 1,
            ghosts=self.workers | (dict(self.before.ghosts) if self.before else {}),
        )
        if not is_state_lost:
            return left
        floor = max(w.incarnation for w in left.ghosts) + INCARNATION_FLOOR
        point = replace(
            point, generation=newest.record.generation, incarnation_floor=floor
        )
        return replace(left, point=point, incarnations={}, start_count=0)

    def left_over(self, manifest: Manifest, values: Values) -> LeftOver:
        """What a job finds that goes on from a checkpoint of this world."""
        job = saved_job_of(manifest, "")
        coordinator, before = self.coordinator, self.before
        newest = coordinator.records[-1].generation if coordinator.records else 0
        ghosts = before.ghosts if before is not None else {}
        return LeftOver(
            settings=self.settings,
            point=replace(job.point, generation=max(newest, job.point.generation)),
            terms=job.terms,
            values=values,
            incarnations=coordinator.disk.incarnations,
            start_count=coordinator.start_count + 1,
            ghosts={**ghosts, **self.workers},
            used=used_of(job.epochs),
            epoch=next(iter(job.epochs), None),
        )

    @property
    def _is_over(self) -> bool:
        if self._mishaps.joiners_left or self.coordinator.has_members:
            return False
        if not all(self.coordinator.has_place(shard) for shard in self.shards):
            return False
        return all(worker.is_gone for worker in self._processes)

    @property
    def _processes(self) -> list[DrivenWorker]:
        """Workers of this life, and those of the one before that go on in it."""
        return [*self.workers.values(), *self._returning]

    # What happens

    def _happen(self, draw: float) -> None:
        self.event_count += 1
        if self.event_count % HEAL_EVENT_COUNT == 0:
            self._heal()
            self._help()
        if draw < 0.05:
            self._mishaps.happen()
        elif draw < 0.08:
            self._pass_time(self.rng.choice((1, 20, 100)))
        elif (draw < 0.3 and self._act()) or (draw < 0.5 and self._run_thread()):
            pass
        elif self._go_on():
            self._quiet_tick_count = 0
        else:
            self._be_quiet()

    def _be_quiet(self) -> None:
        """Nothing is under way that could go on."""
        self._check_that_nobody_is_halted()
        if self._heal():
            self._quiet_tick_count = 0
        else:
            self._quiet_tick_count += 1
            self._pass_time(100)
            if self._quiet_tick_count % HELP_TICK_COUNT == 0:
                self._help()
            if self._quiet_tick_count > QUIET_TICK_COUNT_MAX:
                raise StuckError(self.described())

    def _check_that_nobody_is_halted(self) -> None:
        """In mode quorum nobody is halted by who is stopped, killed, or joins.

        Asked when all is delivered, but for links that are blocked: so many as the
        quorum wants wait for a clock only while the grace window is open.
        """
        core, record = self.shards[0].core, self.shards[0].core.clocks.record
        number = core.clocks.next_clock
        if record is None or number is None or not core.clocks.has_quorum(number):
            return
        is_held = any(s.core.is_frozen or s.is_stopped for s in self.shards)
        is_held |= not all(self.coordinator.has_place(s) for s in self.shards)
        if is_held or self.links.has_blocked or core.state.fence.pending is not None:
            return
        if any(s.core.clocks.record is not record for s in self.shards):
            return
        cut_off = {key for key, _ in self._cut_off_ms}
        waiting = [
            worker
            for worker in self.workers.values()
            if worker.stage is Stage.PUSHING
            and not worker.is_stopped
            and worker.key not in cut_off
            and (member := record.member_of(worker.key)) is not None
            and member.clock_of(worker.sequence + 1) == number
            and worker.pushes[worker.sequence + 1].trailer.weight > 0
        ]
        if len(waiting) >= core.clocks.terms_of(number).quorum:
            assert self.shards[0].wakes, f"clock {number} does not close"

    def _settle(self) -> None:
        """Lets all that is under way arrive, and a while pass."""
        self._rejoin_links()
        for _ in range(3):
            self._heal()
            while self.links.deliver_one() or self._run_thread():
                pass
            self.coordinator.tick(100)

    def cut_off(self, worker: DrivenWorker, shard: SimulatedShard) -> None:
        """A worker and a shard do not reach each other any more."""
        self.links.sever(worker.name, shard.name)
        now_ms = self.coordinator.now_ms
        self._cut_off_ms.setdefault((worker.key, shard.index), now_ms)

    def _rejoin_links(self, key: WorkerKey | None = None) -> None:
        """A worker that was cut off reaches all shards again, or all workers do."""
        for worker, shard_index in list(self._cut_off_ms):
            if key in (None, worker):
                self.links.join(str(worker), self.shards[shard_index].name)
                del self._cut_off_ms[worker, shard_index]
                self._held_ms.pop((worker, shard_index), None)

    def _pass_time(self, duration_ms: int) -> None:
        self._tell_silence()
        until_ms = self.now_ms + duration_ms
        while due := self._woken_until(until_ms):
            at_ms, shard = due
            self.coordinator.tick(max(0, at_ms - self.now_ms))
            shard.wake()
        self.coordinator.tick(until_ms - self.now_ms)
        now_ms, lease_ms = self.coordinator.now_ms, self.settings.lease_ttl_ms
        for place, cut_off_ms in list(self._cut_off_ms.items()):
            if not self._is_holding(*place):
                self._held_ms.pop(place, None)
            held_ms = now_ms - self._held_ms.get(place, now_ms)
            assert held_ms < HELD_LEASES_MAX * lease_ms, f"{place} holds the job up"
            if now_ms - cut_off_ms > CUT_OFF_LEASES_MAX * lease_ms:
                self._rejoin_links(place[0])

    @property
    def now_ms(self) -> int:
        """Monotonic time."""
        return self.coordinator.now_ms

    def _woken_until(self, until_ms: int) -> tuple[int, SimulatedShard] | None:
        """The shard that wants to be woken next, by then."""
        wakes = [
            (at_ms, shard.index)
            for shard in self.shards
            if not shard.is_stopped
            for at_ms in shard.wakes
            if at_ms <= until_ms
        ]
        if not wakes:
            return None
        at_ms, index = min(wakes)
        return at_ms, self.shards[index]

    def _tell_silence(self) -> None:
        """Workers that wait for shards have asked them."""
        now_ms = self.coordinator.now_ms
        for worker in self.workers.values():
            silent_ms = {
                index: now_ms - self._cut_off_ms.get((worker.key, index), now_ms)
                for index in worker.awaited_shards
            }
            if silent_ms:
                self.coordinator.report_silence(worker, silent_ms)
        for place in self._cut_off_ms:
            if self._is_holding(*place):
                self._held_ms.setdefault(place, now_ms)

    def _is_holding(self, key: WorkerKey, shard_index: int) -> bool:
        """Whether a worker that is cut off waits, and others who are not do, too.

        Not where too few would be left without it.
        """
        if self.settings.worker_loss_policy is LossPolicy.WAIT:
            return False
        core = self.coordinator.core
        cut_off = {worker for worker, _ in self._cut_off_ms}
        members = [e.worker for e in core.roster.in_state(WorkerState.MEMBER)]
        left = [worker for worker in members if worker not in cut_off]
        waiting = {
            worker
            for worker in members
            if shard_index in self.workers[worker].awaited_shards
        }
        are_enough = len(left) >= max(1, core.progress.workers_floor)
        return key in waiting and are_enough and bool(waiting.difference(cut_off))

    def _heal(self) -> bool:
        """Networks and processes go on; returns whether any had not."""
        was_blocked = self.links.heal()
        stopped = [w for w in self._processes if w.is_stopped]
        for worker in stopped:
            self._continue_worker(worker)
        was_stopped, self._stopped_shards = self._stopped_shards, []
        for shard in was_stopped:
            self._continue_shard(shard)
        orphaned = [s for s in self.shards if s.is_orphaned]
        for shard in orphaned:
            shard.set_orphaned(False)
        was_full, self.coordinator.disk.is_full = self.coordinator.disk.is_full, False
        return (
            was_blocked
            or bool(stopped)
            or bool(was_stopped)
            or bool(orphaned)
            or was_full
        )

    def _help(self) -> None:
        """Starts a worker in the place of one that is lost, if the job waits for it."""
        for worker_id in self.coordinator.lost_ids():
            alive = [w for k, w in self.workers.items() if k.worker_id == worker_id]
            if all(worker.is_gone for worker in alive):
                self.start_worker(worker_id)
        alive = [w for w in self._processes if not w.is_gone]
        if not self.coordinator.records and len(alive) < self.settings.workers_min:
            self.start_worker(self.coordinator.draw_id())

    def _go_on(self) -> bool:
        """Something that is possible happens; False when nothing is."""
        return self.links.deliver_one() or self._run_thread() or self._act()

    def _act(self) -> bool:
        """Some worker takes its turn."""
        able = [worker for worker in self.workers.values() if worker.may_act]
        if able:
            self.rng.choice(able).act()
        return bool(able)

    def _run_thread(self) -> bool:
        shards = [*self.shards, *self._old_shards]
        busy = [shard for shard in shards if shard.threads and not shard.is_stopped]
        if busy:
            self.rng.choice(busy).run_thread(self.rng)
        return bool(busy)

    def _continue_worker(self, worker: DrivenWorker) -> None:
        worker.is_stopped = False
        self.links.go_on(worker.name)
        self.coordinator.find_again(worker)

    # Shards that are lost

    def kill_shard(self, shard: SimulatedShard) -> None:
        """SIGKILL of a shard; a new process asks for a place."""
        self.links.lose(shard.name)
        shard.threads.clear()
        self.coordinator.lose_shard(shard)
        self.coordinator.seek_place()
        if self.shards[shard.index] is shard and not self.coordinator.records:
            self.shards[shard.index] = self._shard_after(shard)

    def stop_shard(self, shard: SimulatedShard) -> None:
        """SIGSTOP of a shard, whose stream breaks as pings stay unanswered."""
        shard.is_stopped = True
        self.links.stop(shard.name)
        self._stopped_shards.append(shard)
        self.coordinator.lose_shard(shard)

    def _continue_shard(self, shard: SimulatedShard) -> None:
        """SIGCONT: it finds that its lease is over before it does anything else."""
        shard.is_stopped = False
        self.links.go_on(shard.name)
        if self.links.is_lost(shard.name):
            return
        if shard is not self.shards[shard.index]:
            shard.set_orphaned(True)
            self._old_shards.append(shard)
            self.coordinator.seek_place()
        else:
            self.coordinator.reconnect_shard(shard)

    def _shard_after(self, shard: SimulatedShard) -> SimulatedShard:
        """A new process in a place, which has nothing yet."""
        return SimulatedShard(
            shard.index, shard.chunk_indexes, shard.rules, self, start=shard.start + 1
        )

    def _begin_again(self, saved: Saved, point: StartPoint) -> None:
        """The job has returned to a checkpoint: another life begins in this world."""
        before = self.before
        roster = self.coordinator.core.roster
        old = {
            key: worker
            for key, worker in self.workers.items()
            if (entry := roster.find(key)) is None or entry.state in GONE
        }
        images = saved.snapshot.images
        values = {k: v for image in images for k, v in image.values.items()}
        self.before = LeftOver(
            settings=self.settings,
            point=point,
            terms=saved.terms,
            values=dict(sorted(values.items())),
            ghosts={**(before.ghosts if before is not None else {}), **old},
            used=used_of(saved.epochs),
        )
        self.coordinator.go_on_from(self.before)
        self._returning += old.values()
        self.workers = {k: w for k, w in self.workers.items() if k not in old}
        for index, shard in enumerate(self.shards):
            if shard not in self._stopped_shards:
                self.links.lose(shard.name)
            self.shards[index] = self._shard_after(shard)
        self._rejoin_links()

    def bury(self, worker: DrivenWorker) -> None:
        """A worker is no member any more, or will not be."""
        self.lost.add(worker.key)
        worker.stage = Stage.GONE
        self._rejoin_links(worker.key)

    # Workers, as `Network`

    def start_worker(
        self, worker_id: str, predecessor: DrivenWorker | None = None
    ) -> None:
        """A process asks for an id and joins, unless somebody else has it."""
        self._process_count += 1
        key = self.coordinator.register(worker_id, self._process_count)
        if key is None:
            return
        count = self.rng.randint(1, 6)
        worker = DrivenWorker(key, self, count, predecessor)
        self.workers[key] = worker
        self.coordinator.admit(worker)

    def evicted(self, worker: DrivenWorker) -> None:
        """It rejoins by itself, unless its user has had enough."""
        self.bury(worker)
        if self.rng.random() < 0.8 or not self.coordinator.records:
            lost = worker.predecessor or worker
            self.start_worker(worker.key.worker_id, predecessor=lost)

    def sequences_done(self, key: WorkerKey) -> list[int]:
        """Of every shard, the last push of a worker that has ended that counts."""
        return [shard.core.closed_sequence(key) for shard in self.shards]

    def ask_session(self, worker: DrivenWorker, call: Call) -> None:
        """Asks a shard what it has of the worker's pushes."""
        shard = self.shards[call.shard_index]

        def asked() -> None:
            session = shard.session(worker.key)
            self.links.send(
                shard.name, worker.name, lambda: worker.found(call, session)
            )

        self.links.send(worker.name, shard.name, asked)

    def join(self, worker: DrivenWorker, question: Join) -> None:
        """Asks the coordinator for a place."""
        self.coordinator.ask_to_join(worker, question)

    def seed(self, worker: DrivenWorker, order: SeedOrder, number: int) -> None:
        """Writes the first values to every shard, which may not know the fence yet.

        It waits for it, and refuses after a while.
        """
        for shard in self.shards:

            def written(shard: SimulatedShard = shard) -> bool:
                core, fence_number = shard.core, order.fence_number
                is_decided = core.clocks.record or core.is_seeding(fence_number)
                if not is_decided and self.rng.random() < 0.9:
                    return False
                try:
                    shard.seed(worker.key, fence_number)
                except Refusal:
                    answer = partial(worker.seed_refused, number)
                else:
                    answer = partial(worker.seeded, number, shard.index)
                self.links.send(shard.name, worker.name, answer)
                return True

            self.links.send(f"{worker.name} seeds", shard.name, written)

    def check_seeder(self, worker: DrivenWorker) -> None:
        """Who pulls nothing has written the values that all shards have."""
        assert {each.seeder for each in self.shards} == {worker.key}

    def pull(self, worker: DrivenWorker, pull: Pull) -> None:
        """Asks every shard for values at the worker's clock."""
        for shard in self.shards:
            self._pull_one(worker, shard, pull, worker.pull_number)

    def _pull_one(
        self, worker: DrivenWorker, shard: SimulatedShard, pull: Pull, number: int
    ) -> None:
        generation, clock = pull.generation, pull.clock

        def reached() -> bool:
            core = shard.core
            if worker.is_gone or worker.pull_number != number:
                return True
            if not shard.knows(generation) or not core.admits_pull(worker.key, clock):
                return False
            if core.clocks.member_of(worker.key) is None:
                return True
            self.give(shard, worker.key, core.pull_reply(worker.key, clock))
            self.links.send(
                shard.name, worker.name, lambda: worker.pulled(shard.index, number)
            )
            return True

        self.links.send(f"{worker.name} pull", shard.name, reached)

    def deliver_push(
        self, worker: DrivenWorker, call: Call, skip: frozenset[int]
    ) -> None:
        """Sends a push to a shard, without the chunks it has."""
        own = worker.pushes[call.push.sequence]
        self.send_push(worker, call, own, worker.name, skip)

    def send_push(
        self,
        worker: DrivenWorker,
        call: Call,
        own: OwnPush,
        source: str,
        skip: frozenset[int] = frozenset(),
    ) -> None:
        """Sends the messages of a push by a link of this source."""
        shard = self.shards[call.shard_index]
        trailer = own.trailers[call.shard_index]
        chunks = [i for i in sorted(trailer.chunk_indexes) if i not in skip]
        parts: list[int] = [*chunks, *chunks[: self.rng.randint(0, 1)]]
        self.rng.shuffle(parts)
        place = own.place

        def send(what: Callable[[], bool | None]) -> None:
            self.links.send(source, shard.name, what)

        lowest = place.sequence_unacknowledged_min
        where = place.clock, place.generation, lowest
        send(lambda: shard.begin(call, *where, is_last=trailer.is_last))
        is_first = self.rng.random() < 0.7
        if is_first:
            send(lambda: shard.take(call, trailer))
        for index in parts:
            send(lambda index=index: shard.take(call, index))  # type: ignore[misc]
        if not is_first:
            send(lambda: shard.take(call, trailer))

    def commit(self, worker: DrivenWorker, choice: ClockChoice) -> None:
        """Commits a clock on every shard."""
        generation = worker.core.generation
        for shard in self.shards:

            def committed(shard: SimulatedShard = shard) -> bool:
                try:
                    return shard.commit(worker.key, choice, generation)
                except Refusal:
                    assert not self.coordinator.is_member(worker.key)
                    return True

            self.links.send(f"{worker.name} commits", shard.name, committed)

    def ready(self, worker: DrivenWorker, sequence: int) -> None:
        """Tells shard 0 that every shard has all of a push, and asks who counts."""
        shard, generation = self.shards[0], worker.core.generation

        def waited() -> bool:
            is_member = shard.core.clocks.member_of(worker.key) is not None
            if worker.is_gone or worker.sequence >= sequence or not is_member:
                return True
            choice = shard.core.choice_for(worker.key, sequence)
            if choice is None:
                return False
            self.links.send(
                shard.name, worker.name, lambda: worker.told_choice(sequence, choice)
            )
            return True

        def told() -> bool:
            if not shard.knows(generation):
                return False
            if shard.core.clocks.member_of(worker.key) is not None:
                shard.core.ready(worker.key, sequence, self.now_ms)
                shard.pump()
                self.links.send(f"{worker.name} waits", shard.name, waited)
            return True

        self.links.send(f"{worker.name} ready", shard.name, told)

    def await_contribution(self, worker: DrivenWorker) -> None:
        """Tells shard 0 that there is no data for the next push."""
        shard, sequence = self.shards[0], worker.sequence + 1

        def told() -> None:
            is_still = worker.stage is Stage.IDLE and worker.sequence + 1 == sequence
            if is_still and shard.core.clocks.member_of(worker.key) is not None:
                now_ms = self.coordinator.now_ms
                shard.core.await_contribution(worker.key, sequence, now_ms)
                shard.pump()

        self.links.send(worker.name, shard.name, told)

    def withdraw_awaiting(self, worker: DrivenWorker) -> None:
        """There is data after all."""
        shard = self.shards[0]
        self.links.send(
            worker.name,
            shard.name,
            lambda: shard.core.withdraw_awaiting(worker.key),
        )

    def declare(self, worker: DrivenWorker, spec: OptimizerSpec) -> None:
        """Tells the coordinator what the script's optimizer is from now on."""
        self.coordinator.declare(worker, spec)

    def publishes_at(self, sequence: int) -> bool:
        """Whether scripts publish: all of them at the same places, or at will."""
        if not self.publishes:
            return False
        if not self.has_bsp:
            return self.rng.random() < 0.3
        return sequence % 3 == self.settings.workers_min % 3

    def stage_state(self, worker: DrivenWorker, push: PushId) -> None:
        """Sends every shard the state that a push will load, sometimes twice."""
        for shard in self.shards:
            self._stage_one(worker, shard, push, f"{worker.name} stages")
            if self.rng.random() < 0.2:
                self._stage_one(worker, shard, push, f"{worker.name} stages again")

    def _stage_one(
        self, worker: DrivenWorker, shard: SimulatedShard, push: PushId, source: str
    ) -> None:
        generation, digest = worker.core.generation, worker.spec_digest

        def staged() -> bool:
            if not shard.knows(generation) or digest not in shard.declared:
                return False
            try:
                shard.stage_state(push)
            except Refusal as refusal:
                if push.sequence not in worker.pushes:
                    self.refuse(Call(push, shard.index, 1), refusal)
                return True
            self.links.send(
                shard.name, worker.name, lambda: worker.state_staged(push, shard.index)
            )
            return True

        self.links.send(source, shard.name, staged)

    def leave(self, worker: DrivenWorker) -> None:
        """Asks to leave; gone when the record is written."""
        self.coordinator.leave(worker)

    # Shards, as `Surroundings`

    def answer(self, call: Call, reply: Reply) -> None:
        """The answer to a call is on its way."""
        worker = self.workers[call.push.worker]
        shard = self.shards[call.shard_index]
        self.links.send(shard.name, worker.name, lambda: worker.answered(call, reply))

    def give(self, shard: SimulatedShard, worker: WorkerKey, reply: Reply) -> None:
        """Looks in the values for every push that must be in them by now.

        A pull at clock c holds each member's pushes up to c - bound, and the puller's
        own up to c. In BSP also those of members that have ended, as far as they count.
        """
        record = shard.core.clocks.record
        assert record is not None
        assert shard is self.shards[shard.index], "values of before the return"
        if reply.outcome is Outcome.DROPPED:
            return
        for member in record.members:
            if member.worker == worker:
                upto = member.sequence_of(reply.clock)
            elif reply.mode is Mode.ASP:
                continue
            else:
                upto = member.sequence_of(reply.clock - reply.staleness_bound)
            self._check_given_upto(shard, member.worker, upto)
        if not self.is_bsp:
            return
        for departure in self.coordinator.departures_until(record.generation):
            member = departure.member
            upto = min(departure.last_sequence, member.sequence_of(reply.clock))
            self._check_given_upto(shard, member.worker, upto)

    def _check_given_upto(
        self, shard: SimulatedShard, worker: WorkerKey, upto: int
    ) -> None:
        for sequence in range(shard.checked[worker] + 1, upto + 1):
            self._check_given(shard, worker, sequence)
            shard.checked[worker] = sequence

    def _check_given(
        self, shard: SimulatedShard, worker: WorkerKey, sequence: int
    ) -> None:
        own = self.workers[worker].pushes.get(sequence)
        if own is None:
            assert self.may_miss, "nobody has pushed that"
            return
        became = shard.outcomes.get(own.push)
        if became in (Outcome.SKIPPED, Outcome.DROPPED):
            return
        for shard_index, chunk_index in own.places:
            if shard_index == shard.index:
                assert shard.values[chunk_index][own.push] == 1, (
                    f"{own.push} is not in values that the bound demands it in"
                )

    def refuse(self, call: Call, refusal: Refusal) -> None:
        """Nobody but a lost worker is ever refused."""
        if self.before is not None and call.push.worker in self.before.ghosts:
            return
        worker = self.workers[call.push.worker]
        is_ghost = call.number == 0
        is_old = call.push.worker in self.lost or worker.is_stopped or worker.is_gone
        is_closed = not self.coordinator.is_member(call.push.worker)
        assert is_ghost or is_old or is_closed, str(refusal)
        self.links.send(
            self.shards[call.shard_index].name,
            worker.name,
            lambda: worker.refused(call),
        )

    def stage(self, call: Call, choice: ClockChoice) -> None:
        """Word that a clock is staged is on its way."""
        worker = self.workers[call.push.worker]
        shard = self.shards[call.shard_index]
        self.links.send(
            shard.name, worker.name, lambda: worker.told_staged(call, choice)
        )

    def ask(self, worker: WorkerKey, clock: int) -> None:
        """A worker without data is asked for its part of a clock."""
        asked = self.workers[worker]
        self.links.send(self.shards[0].name, asked.name, asked.asked)

    def report(self, shard_index: int, report: FenceReport) -> None:
        """Reports are sent until they are taken: they are late, never lost."""
        self.links.send(
            self.shards[shard_index].name,
            COORDINATOR,
            lambda: self.coordinator.report(shard_index, report),
        )

    def report_image(self, shard_index: int, report: CutReport) -> None:
        """As `report`."""
        self.links.send(
            self.shards[shard_index].name,
            COORDINATOR,
            lambda: self.coordinator.report_image(shard_index, report),
        )

    def report_part(self, shard_index: int, report: PartReport) -> None:
        """As `report`."""
        self.links.send(
            self.shards[shard_index].name,
            COORDINATOR,
            lambda: self.coordinator.report_part(shard_index, report),
        )

    def draw(self, worker: DrivenWorker) -> tuple[DataRange, ...]:
        """Leases a batch, where the job's data is leased."""
        if self.settings.checkpoints is None:
            return ()
        return self.coordinator.lease(worker)

    def described(self) -> str:
        """Where everybody stands, for a person who debugs."""
        workers = ", ".join(
            f"{w.name} {w.stage.value}{' stopped' if w.is_stopped else ''} at "
            f"{w.sequence} {w.core.member}"
            for w in self.workers.values()
        )
        shards = "; ".join(
            f"{s.name} at {s.core.clocks.applied_clock} waits for "
            f"{s.core.waiting_reason} from {s.core.awaited(0)}"
            for s in self.shards
        )
        return (
            f"{self.settings}\nworkers: {workers}\nshards: {shards}\n"
            f"record: {self.coordinator.records[-1:]}\n"
            f"coordinator: {self.coordinator.core.waiting_for()} "
            f"{self.coordinator.core.fence}\nlinks: {self.links}"
        )
