"""Who contributes to which clock.

Invariant: `frontier` never decreases.
Source of clocks and frontier: Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013.
"""

from psserver.core.record import Departure, Member, Record, WorkerKey


class ClockTable:
    """Members with their base clocks, and how far this shard has come.

    Attributes:
        record: Newest record, None before the start.
        applied_clock: Highest clock that is complete here.
    """

    def __init__(self) -> None:
        self.record: Record | None = None
        self.applied_clock = 0
        self._departures: dict[WorkerKey, Departure] = {}

    def install(self, record: Record) -> None:
        """Goes on under a newer record; an older or equal one changes nothing."""
        if self.record is not None and record.generation <= self.record.generation:
            return
        self.record = record
        for departure in record.departures:
            self._departures[departure.member.worker] = departure

    def departure_of(self, worker: WorkerKey) -> Departure | None:
        """How a member ended, if it has."""
        return self._departures.get(worker)

    def member_of(self, worker: WorkerKey) -> Member | None:
        """The present member, if it is one."""
        return self.record.member_of(worker) if self.record else None

    def contributors(self, clock: int) -> tuple[Member, ...]:
        """Members whose push is part of `clock`, in the order of worker ids."""
        if self.record is None:
            return ()
        found = [m for m in self.record.members if m.base_clock < clock]
        found += [
            end.member
            for end in self._departures.values()
            if end.member.base_clock < clock <= end.last_clock
        ]
        return tuple(sorted(found, key=lambda member: member.worker))

    @staticmethod
    def longest(contributors: tuple[Member, ...]) -> Member:
        """The longest contributor, then the lowest id: its hyperparameters count."""
        return min(contributors, key=lambda m: (m.base_clock, m.worker))

    @property
    def frontier(self) -> int:
        """Smallest clock over the members; its last value when nobody is there.

        In BSP every member's clock is the applied clock, and a joiner's base is
        never below it.
        """
        return self.applied_clock

    @property
    def version(self) -> int:
        """Steps of all workers ever that are in the values."""
        return self.record.version_at(self.applied_clock) if self.record else 0
