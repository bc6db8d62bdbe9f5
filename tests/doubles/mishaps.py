"""What goes wrong in a simulated world, as its scenario allows."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pswire.membership import FenceKind
from tests.doubles.driven_worker import DrivenWorker, Stage
from tests.doubles.scenario import Scenario
from tests.doubles.simulated_coordinator import COORDINATOR
from tests.doubles.simulated_shard import Call

if TYPE_CHECKING:
    from tests.doubles.world import World


class Mishaps:
    """Draws and does what goes wrong.

    Attributes:
        restarts_left: Starts of the coordinator that may still happen.
        joiners_left: Workers that will still join.
    """

    def __init__(self, world: "World", scenario: Scenario) -> None:
        rng = world.rng
        self._world = world
        self._scenario = scenario
        self.restarts_left = rng.randint(0, 3) if scenario.restarts_coordinator else 0
        self.joiners_left = rng.randint(0, 3)
        self._losses_left = rng.randint(1, 5) if scenario.loses_workers else 0
        self._cuts_left = rng.randint(1, 4) if scenario.cuts_off else 0
        self._leaders_left = rng.randint(1, 6) if scenario.loses_leaders else 0
        self._shards_left = rng.randint(1, 3) if scenario.loses_shards else 0
        self._changes_left = rng.randint(0, 3) if len(scenario.modes) > 1 else 0

    def happen(self) -> None:
        """Something goes wrong."""
        self._world.rng.choice(self._possible())()

    def _possible(self) -> list[Callable[[], None]]:
        """What may go wrong now; going on is always possible."""
        found: list[Callable[[], None]] = [
            self._world.coordinator.want_cut,
            self._break_call,
            self._haunt,
            self._block_link,
        ]
        if self._world.coordinator.records:
            found.append(self._break_shard_watch)
            found.append(self._orphan_shard)
            found.append(self._flap_worker)
            if self._changes_left:
                found.append(self._change_mode)
        if self._scenario.saves and self._world.coordinator.records:
            found += [self._world.coordinator.want_checkpoint] * 3
        if self._scenario.fills_disk:
            found += [self._fill_disk, self._fill_disk]
        if self.joiners_left and self._world.coordinator.records:
            found.append(self._bring_joiner)
        if all(slot.is_watching for slot in self._world.coordinator.core.shards.slots):
            found.append(self._let_fence_expire)
            if self.restarts_left:
                found.append(self._restart_coordinator)
        if self.restarts_left and self._losses_left and self._world.coordinator.records:
            found.append(self._lose_host)
        if self._cuts_left and self._world.coordinator.records:
            found.append(self._cut_off)
        coordinator = self._world.coordinator
        may_return = coordinator.core.way_back is not None and coordinator.has_members
        if self._shards_left and may_return:
            # Also while the job returns for another one.
            found += [self._lose_shard] * len(found)
        if self._leaders_left and self._pushing():
            # As likely as all else: a push is soon over.
            found += [self._lose_leader] * len(found)
        if self._losses_left and self._world.coordinator.records:
            found += [self._kill_worker, self._stop_worker, self._give_up_step]
            # As likely as all else: it leaves little time.
            found += [self._kill_publisher] * (len(found) if self._publishers() else 0)
        return found

    def _fill_disk(self) -> None:
        """The disk fills up, or there is room again."""
        disk = self._world.coordinator.disk
        disk.is_full = not disk.is_full

    def _bring_joiner(self) -> None:
        self.joiners_left -= 1
        self._world.start_worker(self._world.coordinator.draw_id())

    def _change_mode(self) -> None:
        self._changes_left -= 1
        terms = self._scenario.terms(self._world.rng)
        self._world.coordinator.set_mode(terms)

    def _block_link(self) -> None:
        """A partition, in one direction."""
        link = self._world.links.random_link()
        if link is not None:
            self._world.links.block(*link)

    def _orphan_shard(self) -> None:
        """A shard has not heard the coordinator for a lease."""
        shard = self._world.rng.choice(self._world.shards)
        self._world.coordinator.break_shard(shard)
        shard.set_orphaned(True)

    def _haunt(self) -> None:
        """A push comes again, late, by a call that nobody waits for."""
        before = self._world.before
        ghosts = before.ghosts if before is not None else {}
        workers = [*self._world.workers.values(), *ghosts.values()]
        worker = self._world.rng.choice(workers)
        old = [
            own
            for own in worker.pushes.values()
            if worker.is_gone
            or worker.key in ghosts
            or own.push.sequence <= worker.sequence
        ]
        if old:
            own = self._world.rng.choice(old)
            # There may have been fewer shards, or more, before all was killed.
            shard_count = min(len(self._world.shards), len(own.trailers))
            shard_index = self._world.rng.randrange(shard_count)
            self._world.send_push(worker, Call(own.push, shard_index, 0), own, "ghost")

    def _break_call(self) -> None:
        """A call breaks in the middle; its worker asks and sends again."""
        workers = list(self._world.workers.values())
        if not workers:
            return  # all are told that the job has returned to a checkpoint
        worker = self._world.rng.choice(workers)
        shard = self._world.rng.choice(self._world.shards)
        if not worker.is_calling(shard.index) or worker.is_gone:
            return
        self._world.links.cut(worker.name, shard.name)
        self._world.links.cut(shard.name, worker.name)
        shard.hang_up(worker.key)
        worker.call_broken(shard.index)

    def _break_shard_watch(self) -> None:
        self._world.coordinator.break_shard(self._world.rng.choice(self._world.shards))

    def _restart_coordinator(self) -> None:
        self.restarts_left -= 1
        for stranger in self._world.coordinator.restart():
            self._world.bury(stranger)
            self._world.start_worker(stranger.key.worker_id)

    def _let_fence_expire(self) -> None:
        fence = self._world.coordinator.core.fence
        if fence is not None and fence.kind is not FenceKind.START:
            self._world.coordinator.tick(
                self._world.coordinator.core.settings.fence_timeout_ms
            )

    # Losses

    def _live(self) -> list[DrivenWorker]:
        workers = self._world.workers.values()
        return [w for w in workers if not w.is_gone and not w.is_stopped]

    def _random_live(self) -> DrivenWorker | None:
        live = self._live()
        return self._world.rng.choice(live) if live else None

    def _kill_worker(self) -> None:
        """SIGKILL: what is under way from it may or may not have arrived."""
        worker = self._random_live()
        if worker is None:
            return
        self._losses_left -= 1
        self._kill(worker)
        self._world.coordinator.lose(worker)

    def _publishers(self) -> list[DrivenWorker]:
        """Workers whose values are written in some place, and not yet on all shards."""
        found = []
        for worker in self._live():
            own = worker.pushes.get(worker.sequence + 1)
            if own is not None and own.trailer.publishes:
                shards = self._world.shards
                is_begun = any(
                    counts[own.push] for s in shards for counts in s.values.values()
                )
                if is_begun and any(own.push not in s.outcomes for s in shards):
                    found.append(worker)
        return found

    def _kill_publisher(self) -> None:
        """What others do in its clock must not turn it into a clock of steps."""
        self._losses_left -= 1
        worker = self._world.rng.choice(self._publishers())
        self._kill(worker)
        self._world.coordinator.lose(worker)

    def _lose_host(self) -> None:
        """The coordinator is killed together with any set of workers.

        They end by one record then, once the new coordinator has waited for them. Often
        it is all whose pushes are under way: nobody is left to complete their clock.
        Workers that live may stand still meanwhile, and shards lose touch.
        """
        rng = self._world.rng
        self._losses_left -= 1
        live = self._live()
        pushing = [worker for worker in live if worker.stage is Stage.PUSHING]
        dying = rng.choice((live, pushing))
        count = rng.choice((len(dying), rng.randint(0, len(dying))))
        for worker in rng.sample(dying, count):
            self._kill(worker)
        for worker in self._live():
            if worker.is_member and rng.random() < 0.2:
                worker.is_stopped = True
                self._world.links.stop(worker.name)
        for shard in self._world.shards:
            if rng.random() < 0.3:
                shard.set_orphaned(True)
        self._restart_coordinator()

    def _kill(self, worker: DrivenWorker) -> None:
        self._world.bury(worker)
        for shard in self._world.shards:
            if self._world.rng.random() < 0.5:
                self._world.links.cut(worker.name, shard.name)
        self._world.links.cut(worker.name, COORDINATOR)

    def _stop_worker(self) -> None:
        """SIGSTOP: its stream breaks when pings stay unanswered."""
        worker = self._random_live()
        if worker is None or not worker.is_member:
            return
        self._losses_left -= 1
        worker.is_stopped = True
        self._world.links.stop(worker.name)
        if self._world.rng.random() < 0.8:
            self._world.coordinator.lose(worker)

    def _cut_off(self) -> None:
        """A worker and one shard do not reach each other until it is decided on."""
        worker = self._random_live()
        if worker is not None and worker.is_member:
            self._cuts_left -= 1
            self._world.cut_off(worker, self._world.rng.choice(self._world.shards))

    def _lose_shard(self) -> None:
        """SIGKILL or SIGSTOP of a shard, be it that the job returns for another one."""
        rng, world = self._world.rng, self._world
        living = [each for each in world.shards if world.coordinator.has_place(each)]
        if not living:
            return
        self._shards_left -= 1
        shard = rng.choice(living)
        if rng.random() < 0.7:
            world.kill_shard(shard)
        else:
            world.stop_shard(shard)

    def _pushing(self) -> list[DrivenWorker]:
        return [worker for worker in self._live() if worker.stage is Stage.PUSHING]

    def _lose_leader(self) -> None:
        """A host group's leader is killed: of its commits any have arrived."""
        rng, world = self._world.rng, self._world
        self._leaders_left -= 1
        worker = rng.choice(self._pushing())
        for shard in world.shards:
            world.links.cut(worker.name, shard.name)
            world.links.cut(shard.name, worker.name)
            if rng.random() < 0.5:
                world.links.cut(f"{worker.name} commits", shard.name)
            world.links.cut(f"{worker.name} ready", shard.name)
            world.links.cut(f"{worker.name} waits", shard.name)
            shard.hang_up(worker.key)
        worker.lead_anew()

    def _flap_worker(self) -> None:
        """A worker's stream breaks and comes back."""
        worker = self._random_live()
        if worker is not None and worker.is_member:
            self._world.coordinator.flap(worker)

    def _give_up_step(self) -> None:
        """A step timed out, its user has had enough and leaves."""
        pushing = [w for w in self._world.workers.values() if w.stage is Stage.PUSHING]
        if pushing:
            self._losses_left -= 1
            worker = self._world.rng.choice(pushing)
            self._world.lost.add(worker.key)
            worker.stage = Stage.LEAVING
            self._world.leave(worker)
