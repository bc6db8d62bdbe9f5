"""How a host group's leader deals one epoch's batches to the group's processes.

Towards the coordinator the group is one worker, which holds what any of its processes
holds; each answer of the coordinator repeats all of that. Batches go round in the order
of process ids, whoever asks first, so that a run repeats. What a process that is gone
had in its hands is dealt again, unless a sealed step has it.

Pure.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from pswire.leased_data import DataRange
from psworker.backends.host.messages import ProcessId


class Deal:
    """One epoch of one loader, in the leader.

    Attributes:
        is_closed: Whether every range of it is accounted for.
    """

    def __init__(
        self, hands: Mapping[ProcessId, Iterable[DataRange]] | None = None
    ) -> None:
        """Begins, or goes on where another leader was.

        Args:
            hands: What living processes have of it.
        """
        self.is_closed = False
        self._hands = {
            process: set(ranges) for process, ranges in (hands or {}).items()
        }
        self._queues: dict[ProcessId, deque[DataRange]] = {}
        self._pool: list[DataRange] = []
        self._known = {each for hand in self._hands.values() for each in hand}
        self._turn = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody has or will get anything of what is known."""
        return not (
            self._pool or any(self._hands.values()) or any(self._queues.values())
        )

    def wanted(
        self, process: ProcessId, count: int, members: Sequence[ProcessId]
    ) -> int:
        """How many more batches to ask for, so that a process can have so many."""
        if len(self._queues.get(process, ())) >= count:
            return 0
        queued = sum(map(len, self._queues.values())) + len(self._pool)
        return max(1, count * len(members) - queued)

    def note_used(self, ranges: Iterable[DataRange]) -> None:
        """These are behind pushes, or are on their way there."""
        used = set(ranges)
        self._known |= used
        for hand in self._hands.values():
            hand -= used

    def take_in(
        self, ranges: Iterable[DataRange], members: Sequence[ProcessId]
    ) -> None:
        """Deals what the group holds and nobody has had yet, in order."""
        fresh = sorted(set(ranges) - self._known)
        self._known.update(fresh)
        self._pool += fresh
        self._share(members)

    def hand_out(self, process: ProcessId, count: int) -> tuple[DataRange, ...]:
        """At most so many batches for a process, which has them from now on."""
        queue = self._queues.setdefault(process, deque())
        given = tuple(queue.popleft() for _ in range(min(count, len(queue))))
        self._hands.setdefault(process, set()).update(given)
        return given

    def give_back(self, process: ProcessId, ranges: Iterable[DataRange]) -> None:
        """A process does not use these after all."""
        hand = self._hands.get(process, set())
        returned = hand.intersection(ranges)
        hand -= returned
        self._pool = sorted((*self._pool, *returned))

    def give_all_back(self, process: ProcessId) -> None:
        """A process uses nothing more of it."""
        self.give_back(process, tuple(self._hands.get(process, ())))

    def lose(
        self, processes: Iterable[ProcessId], members: Sequence[ProcessId]
    ) -> None:
        """Processes are gone: what they had goes to the others."""
        for process in processes:
            self.give_all_back(process)
            self._hands.pop(process, None)
            self._pool = sorted((*self._pool, *self._queues.pop(process, ())))
        self._share(members)

    @property
    def processes(self) -> frozenset[ProcessId]:
        """Who has had anything of it."""
        return frozenset((*self._hands, *self._queues))

    def _share(self, members: Sequence[ProcessId]) -> None:
        for each in self._pool if members else ():
            process = members[self._turn % len(members)]
            self._turn += 1
            self._queues.setdefault(process, deque()).append(each)
        if members:
            self._pool = []
