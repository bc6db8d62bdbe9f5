"""A host group in one process: cores, their links, user threads, memory and a shard.

Everything happens one event at a time, in an order that is drawn. A gradient is a set
with one name in it, so that a sum says whose gradients it holds; memory is read when an
order is carried out, not when it is given, so that what is overwritten too early shows.
"""

import random
from collections import deque
from dataclasses import dataclass, field

from pswire.membership import WorkerKey
from psworker.backends.backend import LeaderError
from psworker.backends.host.core import HostCore
from psworker.backends.host.effects import (
    Arrive,
    Drop,
    Found,
    Lead,
    Order,
    Push,
    Send,
    Task,
)
from psworker.backends.host.messages import (
    Admit,
    Done,
    Excluded,
    Failed,
    GroupStatus,
    Message,
    ProcessId,
    PushPlace,
    Reduce,
    StepPart,
)

WORKER = WorkerKey("host", 1)
PRESENCE = (True,)

Names = frozenset[str]


@dataclass
class SimulatedShard:
    """Applies a push once; what it is sent again must be the same.

    Attributes:
        pushes: By sequence, what was applied.
    """

    pushes: list[tuple[Names, float]] = field(default_factory=list)

    def push(self, sequence: int, names: Names, weight: float) -> None:
        if sequence == len(self.pushes) + 1:
            self.pushes.append((names, weight))
        assert sequence == len(self.pushes), f"push {sequence} after {self.pushes}"
        assert self.pushes[-1] == (names, weight), "other bytes under the same number"


@dataclass
class Memory:
    """What a process shares."""

    gradient: Names = frozenset()
    share: Names = frozenset()
    values: int = 0


class Process:
    """One process: its core, and its user's thread."""

    def __init__(
        self, world: "World", process_id: ProcessId, count: int, step_count: int
    ) -> None:
        self.world = world
        self.process_id = process_id
        self.core = HostCore(process_id, count=count, patience_ms=10)
        self.memory = Memory()
        self.orders: deque[Task] = deque()
        self.alive = True
        self.running = True  # not standing still
        self.steps_left = step_count
        self.is_stepping = False
        self.name = ""
        self.call_count = 0
        self.values = -1
        self.returned: list[tuple[int, str]] = []  # step and gradient
        self.ended = False
        self.excluded = False
        self.token = ""

    @property
    def shard(self) -> SimulatedShard:
        """Where pushes of the group's incarnation go."""
        return self.world.shards[self.token]

    @property
    def is_told_out(self) -> bool:
        """Whether the group has gone on without it, as a look at its sockets shows."""
        said = [message for link in self.world.links_to(self) for message in link]
        return self.core.is_out or any(isinstance(each, Excluded) for each in said)

    def status(self) -> GroupStatus:
        sequence = len(self.shard.pushes)
        return GroupStatus(
            token=self.token,
            worker=WORKER,
            rank=0,
            worker_count=1,
            sequence=sequence,
            clock=sequence,
            generation=1,
            mode="bsp",
        )

    def work(self) -> bool:
        """One turn of the user's thread; whether it had something to do."""
        if self.orders:
            self.carry_out(self.orders.popleft())
        elif not self.core.is_member or self.is_stepping or self.ended:
            return False
        elif self.values < 0:
            return False  # it waits for the first values
        elif self.steps_left:
            self.steps_left -= 1
            self.is_stepping = True
            if not self.core.is_settling:
                self.call_count += 1
                self.name = (
                    f"{self.process_id.number}.{self.process_id.life}.{self.call_count}"
                )
                self.memory.gradient = frozenset({self.name})
            self.core.offer(StepPart(weight=1.0, presence=PRESENCE))
        elif (
            self.world.lingers
            and self.core.is_leader
            and self.core.others
            and not self.core.is_awaited
        ):
            return False
        else:
            self.ended = True
            self.core.leave()
        return True

    def carry_out(self, task: Task) -> None:
        world = self.world
        match task:
            case Found():
                self.token = f"incarnation {len(world.shards)}"
                world.shards[self.token] = SimulatedShard()
                self.values = self.memory.values = 0
                self.core.founded(self.status())
            case Admit(done=done):
                self.token = done.status.token
                self.values = world.memory_of(self.process_id, done.source).values
            case Arrive(step=step, done=done):
                if done.source != self.process_id:
                    self.memory.values = self.values
                place = PushPlace(worker=WORKER, sequence=step, clock=step)
                self.core.arrived(place, self.status())
            case Reduce(attempt=attempt, parts=parts):
                memories = [world.memory_of(self.process_id, each) for each in parts]
                self.memory.share = frozenset().union(*(m.gradient for m in memories))
                self.core.reduced(attempt, 1.0)
            case Push(seal=seal):
                shares = {world.memory_of(self.process_id, e).share for e in seal.parts}
                if self.is_told_out and len(self.shard.pushes) >= seal.step:
                    return  # whatever it sends is refused, or a duplicate
                assert len(shares) == 1, f"shares of {shares}"
                names = shares.pop()
                assert len(names) == len(seal.parts)
                self.shard.push(seal.step, names, seal.weight)
                if self.is_told_out:
                    return
                if world.draw.random() < world.failure_chance:
                    error = LeaderError.of(TimeoutError("too long"))
                    self.core.failed(Failed(self.process_id, error))
                    self.is_stepping = False
                    self.steps_left += 1
                    return
                self.memory.values = len(self.shard.pushes)
                self.core.pushed(
                    Done(
                        step=seal.step,
                        source=self.process_id,
                        status=self.status(),
                        parts=seal.parts,
                    )
                )
            case Done(step=step, source=source, parts=parts):
                self.values = world.memory_of(self.process_id, source).values
                if self.is_told_out:
                    return  # others go on, and may have written over them
                assert self.values == step, "values of another step"
                if self.is_stepping:
                    assert self.process_id in parts, "a step that it had no part in"
                    self.returned.append((step, self.name))
                self.is_stepping = False
            case Failed():
                self.is_stepping = False
                self.steps_left += 1
            case Excluded():
                self.excluded = True
                self.ended = True


class World:
    """Processes of one machine, and who kills them.

    Attributes:
        shards: Where pushes go, of each incarnation of the group.
        lingers: Whether a leader that is done waits for the others to end.
    """

    def __init__(self, draw: random.Random, *, failure_chance: float = 0.0) -> None:
        self.draw = draw
        self.failure_chance = failure_chance
        self.shards: dict[str, SimulatedShard] = {}
        self.lingers = draw.random() < 0.7
        self.processes: dict[ProcessId, Process] = {}
        self.links: dict[tuple[ProcessId, ProcessId], deque[Message | None]] = {}
        self.now_ms = 0
        self._life = 0

    def enter(self, index: int, *, count: int, step_count: int) -> Process:
        """A process comes, and meets all that are there."""
        self._life += 1
        process_id = ProcessId(index, self._life)
        made = Process(self, process_id, count, step_count)
        for other in self.processes.values():
            if other.alive and not other.core.is_out:
                self.links[process_id, other.process_id] = deque()
                self.links[other.process_id, process_id] = deque()
                other.core.connected(process_id)
                made.core.connected(other.process_id, other.core.view)
        self.processes[process_id] = made
        made.core.entered(self.now_ms)
        self.carry(made)
        return made

    def memory_of(self, reader: ProcessId, process_id: ProcessId) -> Memory:
        """Of any process that it has met, the dead too."""
        assert reader == process_id or (reader, process_id) in self.links, (
            "it was never mapped"
        )
        return self.processes[process_id].memory

    def kill(self, process: Process) -> None:
        process.alive = False
        for (sender, _), link in self.links.items():
            if sender == process.process_id:
                link.append(None)  # after what it has said

    def carry(self, process: Process) -> None:
        for effect in process.core.take_effects():
            match effect:
                case Order(task=task):
                    process.orders.append(task)
                case Send(process=process_id, message=message):
                    link = self.links.get((process.process_id, process_id))
                    if link is not None and self.processes[process_id].alive:
                        link.append(message)
                case Drop(process=process_id):
                    link = self.links.get((process.process_id, process_id))
                    if link is not None:
                        link.append(None)
                case Lead():
                    pass

    def links_to(self, process: Process) -> list[deque[Message | None]]:
        return [
            link for (_, to), link in self.links.items() if to == process.process_id
        ]

    def look_for_exclusion(self, process: Process) -> None:
        """Before anything else a process looks at all of its sockets for this."""
        for (sender, to), link in self.links.items():
            if to == process.process_id and Excluded() in link:
                process.core.take(sender, Excluded())

    def turn(self) -> bool:
        """One event, drawn among those that can happen; whether there was any."""
        acting = [p for p in self.processes.values() if p.alive and p.running]
        links = [
            (pair, link)
            for pair, link in self.links.items()
            if link and self.processes[pair[1]] in acting
        ]
        choices = list(range(len(links) + len(acting)))
        self.draw.shuffle(choices)
        for choice in choices:
            if choice < len(links):
                (sender, receiver), link = links[choice]
                process = self.processes[receiver]
                self.look_for_exclusion(process)
                message = link.popleft()
                if message is None:
                    process.core.lost(sender)
                else:
                    process.core.take(sender, message)
                self.carry(process)
                return True
            process = acting[choice - len(links)]
            self.look_for_exclusion(process)
            if process.work():
                self.carry(process)
                return True
        return False

    def pass_time(self) -> None:
        """Nothing else happens: who stands still too long is given up."""
        self.now_ms += 20
        for process in [p for p in self.processes.values() if p.alive and p.running]:
            if any(self.links_to(process)):
                continue  # what was said comes first, as on a process's own sockets
            for process_id in sorted(process.core.watched):
                if not self.processes[process_id].running:
                    process.core.lost(process_id)
            process.core.tick(self.now_ms)
            self.carry(process)
