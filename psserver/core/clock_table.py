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
        self._unfinished: list[Departure] = []
        self._contributors: dict[int, tuple[Member, ...]] = {}

    def install(self, record: Record) -> None:
        """Goes on under a newer record; an older or equal one changes nothing."""
        if self.record is not None and record.generation <= self.record.generation:
            return
        self.record = record
        ended = {departure.member.worker: departure for departure in record.departures}
        self._departures.update(ended)
        known = (e for e in self._unfinished if e.member.worker not in ended)
        self._prune([*known, *record.departures])

    def complete(self, clock: int) -> None:
        """The clock after the applied one is complete."""
        assert clock == self.applied_clock + 1
        self.applied_clock = clock
        self._prune(self._unfinished)

    def departure_of(self, worker: WorkerKey) -> Departure | None:
        """How a member ended, if it has."""
        return self._departures.get(worker)

    def member_of(self, worker: WorkerKey) -> Member | None:
        """The present member, if it is one."""
        return self.record.member_of(worker) if self.record else None

    def contributors(self, clock: int) -> tuple[Member, ...]:
        """Members whose push is part of `clock`, in the order of worker ids.

        Args:
            clock: The applied clock or a later one.
        """
        known = self._contributors.get(clock)
        if known is None:
            found = [
                *(m for m in self._members if m.base_clock < clock),
                *(
                    end.member
                    for end in self._unfinished
                    if end.member.base_clock < clock <= end.last_clock
                ),
            ]
            known = tuple(sorted(found, key=lambda member: member.worker))
            self._contributors[clock] = known
        return known

    def is_empty(self, clock: int, cut_clock: int = 0) -> bool:
        """Whether nobody contributes to `clock`, now or later.

        So it is when everybody joined after it, and, up to the clock of a cut, when
        there is no member: a joiner's base is never below what any shard has touched.
        """
        if self.contributors(clock):
            return False
        bases = [member.base_clock for member in self._members]
        return clock <= min(bases, default=cut_clock)

    @property
    def senders(self) -> tuple[Member, ...]:
        """Members, and those that ended whose last clock is not complete here."""
        ended = (
            e.member for e in self._unfinished if e.last_clock > self.applied_clock
        )
        return (*self._members, *ended)

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

    @property
    def _members(self) -> tuple[Member, ...]:
        return self.record.members if self.record is not None else ()

    def _prune(self, departures: list[Departure]) -> None:
        # The applied clock's own contributors are still asked for, to be answered.
        self._unfinished = [
            end for end in departures if end.last_clock >= self.applied_clock
        ]
        self._contributors.clear()
