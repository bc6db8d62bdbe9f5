"""Who contributes to which clock, and how far everybody is on this shard.

Invariants: `frontier` and `version` never decrease.
Source of clocks and frontier: Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013.
"""

from collections.abc import Iterator

from psserver.shard.core.member_on_shard import Era, MembersOnShard
from psserver.shard.core.push import PushId
from pswire.membership import Departure, Member, Mode, ModeTerms, Record, WorkerKey
from pswire.reasons import ErrorReason, Refusal


class ClockTable:
    """Members with their bases, and how far this shard has come.

    Attributes:
        record: Newest record, None before the start.
        applied_clock: Highest clock of BSP that is complete here; in SSP and ASP
            the one after which pushes are applied by themselves.
    """

    def __init__(self, on_shard: MembersOnShard) -> None:
        self.record: Record | None = None
        self.applied_clock = 0
        self._on_shard = on_shard
        self._unfinished: list[Departure] = []
        self._contributors: dict[int, tuple[Member, ...]] = {}
        # Up to each of these clocks what closes one is as in a mode before.
        self._terms_before: list[tuple[int, ModeTerms]] = []
        self._is_draining = False  # BSP begins after the pushes of the mode before
        self._frontier = 0
        self._version = 0

    def install(self, record: Record) -> None:
        """Goes on under a newer record; an older or equal one changes nothing."""
        known = self.record
        if known is not None and record.generation <= known.generation:
            return
        if known is not None and record.mode_clock != known.mode_clock:
            assert self.is_settled, "a mode began before the one before it was settled"
            if not (known.mode.rules.is_clocked or record.mode.rules.is_clocked):
                # No clock of BSP lies between two modes without.
                self.applied_clock = record.mode_clock
        if known is None:
            # The clocks up to that of a checkpoint are in the first values.
            self.applied_clock = record.mode_clock
        was_streamed = known is not None and not known.mode.rules.is_clocked
        if was_streamed and record.mode.rules.is_clocked:
            self._is_draining = True
        self._keep_terms(record)
        self.record = record
        ended = {departure.member.worker for departure in record.departures}
        for departure in record.departures:
            self._on_shard.close(departure, self._era)
        known_ends = (e for e in self._unfinished if e.member.worker not in ended)
        self._unfinished = [*known_ends, *record.departures]
        unfinished = {end.member.worker for end in self._unfinished}
        self._on_shard.forget_departed(unfinished)
        self.note_progress()

    def complete(self, clock: int) -> None:
        """The clock after the applied one is complete."""
        assert clock == self.applied_clock + 1
        self.applied_clock = clock
        if self._terms_before:
            self._terms_before = [e for e in self._terms_before if e[0] > clock]

    def note_progress(self) -> None:
        """Pushes are done, or the record is new: brings everything up to date."""
        # The applied clock's own contributors are still asked for, to be answered.
        self._unfinished = [
            end
            for end in self._unfinished
            if self.done_of(end.member.worker) < end.last_sequence
            or (
                end.last_clock == self.applied_clock
                and not self.is_streamed(end.member, end.last_sequence)
            )
        ]
        self._contributors.clear()
        if self._is_draining and self._is_drained:
            assert self.record is not None
            self._is_draining = False
            self.applied_clock = self.record.mode_clock

    # Members

    def departure_of(self, worker: WorkerKey) -> Departure | None:
        """How a member ended, if it has."""
        return self._on_shard.departure_of(worker)

    def member_of(self, worker: WorkerKey) -> Member | None:
        """The present member, if it is one."""
        return self.record.member_of(worker) if self.record else None

    @property
    def members(self) -> tuple[Member, ...]:
        """Members of the newest record."""
        return self.record.members if self.record is not None else ()

    @property
    def senders(self) -> tuple[Member, ...]:
        """Members, and those that ended of whose pushes some are not done here."""
        return (*self.members, *(end.member for end in self.unfinished))

    @property
    def unfinished(self) -> Iterator[Departure]:
        """Members that ended and of whose pushes some are not done here."""
        return (
            end
            for end in self._unfinished
            if self.done_of(end.member.worker) < end.last_sequence
        )

    def done_of(self, worker: WorkerKey) -> int:
        """A worker's last push that is done here, and counts."""
        done = self._on_shard.window_of(worker).done_sequence
        ended = self._on_shard.departure_of(worker)
        return done if ended is None else min(done, ended.last_sequence)

    def clock_of(self, member: Member) -> int:
        """Clock of a member on this shard."""
        return member.clock_of(self.done_of(member.worker))

    def in_phase(self, member: Member, clock: int) -> tuple[WorkerKey, ...]:
        """Contributors to a clock whose scripts have made as many pushes as its own."""
        return tuple(
            each.worker
            for each in self.contributors(clock)
            if each.start_clock == member.start_clock
        )

    # Modes

    @property
    def mode(self) -> Mode:
        """Mode of the newest record."""
        return self.record.mode if self.record is not None else Mode.BSP

    @property
    def is_clocked(self) -> bool:
        """Whether the newest record's mode applies pushes clock by clock."""
        return self.mode.rules.is_clocked

    @property
    def lag_max(self) -> int | None:
        """Clocks that values may lag behind their reader; None without a bound."""
        bound = self.record.staleness_bound if self.record is not None else 0
        return self.mode.rules.lag_max(bound)

    def terms_of(self, clock: int) -> ModeTerms:
        """What closes a clock: the mode that it is of, with its numbers."""
        for last_clock, terms in self._terms_before:
            if clock <= last_clock:
                return terms
        return self.record.terms if self.record is not None else ModeTerms(Mode.BSP)

    def has_quorum(self, clock: int) -> bool:
        """Whether a clock closes when a quorum has pushed for it."""
        if self._terms_before:
            return self.terms_of(clock).mode.rules.has_quorum
        return self.mode.rules.has_quorum

    def is_streamed(self, member: Member, sequence: int) -> bool:
        """Whether a push is applied by itself and not as part of a clock."""
        era = self._on_shard.era_of(member.worker) or self._era
        return era.streams(member, sequence)

    @property
    def is_settled(self) -> bool:
        """Whether everything of the mode before is applied here.

        The clock alone does not say: two modes may begin after the same one.
        """
        return self.record is None or (
            not self._is_draining and self.applied_clock >= self.record.mode_clock
        )

    @property
    def next_clock(self) -> int | None:
        """Clock of BSP to be worked on; None while pushes are applied by themselves."""
        number = self.applied_clock + 1
        if self.record is None:
            return None
        return number if self.is_settled is self.is_clocked else None

    # Clocks

    @property
    def first_clock(self) -> int | None:
        """First clock of BSP after another mode; None when BSP always ruled."""
        if self.record is None or not self.is_clocked:
            return None
        return self.record.mode_clock + 1 if self.record.mode_clock else None

    def contributors(self, clock: int) -> tuple[Member, ...]:
        """Members whose push is part of `clock`, in the order of worker ids.

        Args:
            clock: The applied clock or a later one, of BSP.
        """
        known = self._contributors.get(clock)
        if known is None:
            found = [
                *(m for m in self.members if m.base_clock < clock),
                *(
                    end.member
                    for end in self._unfinished
                    if end.member.base_clock < clock <= end.last_clock
                    and not self.is_streamed(end.member, end.member.sequence_of(clock))
                ),
            ]
            known = tuple(sorted(found, key=lambda member: member.worker))
            self._contributors[clock] = known
        return known

    def is_empty(self, clock: int, cut_clock: int = 0) -> bool:
        """Whether nobody contributes to `clock`, now or later.

        So it is when everybody joined after it, and, up to the clock of a cut or of
        a change of mode, when there is no member: a joiner's base is never below what
        any shard has touched.
        """
        if self.contributors(clock):
            return False
        bases = [member.base_clock for member in self.members]
        if self.record is not None and not self.is_clocked:
            cut_clock = max(cut_clock, self.record.mode_clock)
        return clock <= min(bases, default=cut_clock)

    @property
    def frontier(self) -> int:
        """Smallest clock over the members; its last value when nobody is there.

        Members that have ended hold it back until their pushes that count are in the
        values: a joiner's base alone would say more than was applied.
        """
        clocks = [self.clock_of(member) for member in self.senders]
        self._frontier = max(self._frontier, min(clocks, default=self.applied_clock))
        return self._frontier

    @property
    def version(self) -> int:
        """Steps of all workers ever that are in the values.

        What was applied of an evicted worker beyond its last push stays counted as far
        as it was told.
        """
        if self.record is not None:
            lacking = sum(
                end.last_sequence - self.done_of(end.member.worker)
                for end in self._unfinished
            )
            present = sum(self.done_of(m.worker) for m in self.members)
            now = self.record.departed_step_count - lacking + present
            self._version = max(self._version, now)
        return self._version

    # Inside

    def _keep_terms(self, record: Record) -> None:
        """Clocks that a mode before has begun go on by its terms."""
        known = self.record
        if (
            known is None
            or known.terms == record.terms
            or not known.mode.rules.is_clocked
        ):
            return
        kept_clock = max((clock for clock, _ in self._terms_before), default=0)
        if record.terms_clock > max(kept_clock, self.applied_clock):
            self._terms_before.append((record.terms_clock, known.terms))

    @property
    def _era(self) -> Era:
        assert self.record is not None
        return Era(self.record.mode, self.record.mode_clock)

    @property
    def _is_drained(self) -> bool:
        """Whether BSP may begin, since all pushes of the mode before are done."""
        # One that ended may have pushed for a clock of BSP already, which comes next.
        has_streamed = any(
            self.is_streamed(end.member, self.done_of(end.member.worker) + 1)
            for end in self.unfinished
        )
        return not has_streamed and all(
            self.done_of(m.worker) >= m.base_sequence for m in self.members
        )


def admitted_member(
    clocks: ClockTable, worker: WorkerKey, sequence: int | None = None
) -> Member:
    """The member that a call comes from.

    Args:
        clocks: Members.
        worker: Who calls.
        sequence: For a push, its number: one that ended may still ask for the
            answers to its pushes up to the last one.

    Raises:
        Refusal: `RECOVERING` or `WORKER_INCARNATION_STALE`.
    """
    if clocks.record is None:
        raise Refusal(
            ErrorReason.RECOVERING, "the shard has no record to work under yet"
        )
    member = clocks.member_of(worker)
    if member is not None:
        return member
    departure = clocks.departure_of(worker)
    if departure is not None and sequence is not None:
        if sequence <= departure.last_sequence:
            return departure.member
        raise closed_refusal(departure)
    raise Refusal(
        ErrorReason.WORKER_INCARNATION_STALE,
        f"{worker} is not a member of generation {clocks.record.generation}",
    )


def closed_refusal(departure: Departure) -> Refusal:
    """Why a push beyond a member's last one is refused."""
    return Refusal(
        ErrorReason.WORKER_INCARNATION_STALE,
        f"{departure.member.worker} was closed at push {departure.last_sequence}",
        sequence_closed=departure.last_sequence,
    )


def check_clock(member: Member, push: PushId, clock: int) -> None:
    """Checks the clock that a header names against the one it follows from.

    Raises:
        Refusal: `MALFORMED_MESSAGE`.
    """
    expected = member.clock_of(push.sequence)
    if clock != expected:
        raise Refusal(
            ErrorReason.MALFORMED_MESSAGE,
            f"push {push.sequence} of {push.worker} is of clock {expected}, the header "
            f"says {clock}",
        )
