"""All that a shard's core keeps for one worker, in one object."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from psserver.shard.core.push import PushEntry, PushId, PushWindow, Trailer
from psserver.shard.core.quorum import LAST_PUSH_WAIT_MS
from pswire.aggregation import NO_COUNTS, GradientCounts
from pswire.awaited import NOT_KNOWN
from pswire.limits import WAITING_INTERVAL_MS
from pswire.membership import ClockChoice, Departure, Member, Mode, WorkerKey

DEPARTED_COUNT_MAX = 1_024
"""Departed workers that are remembered, so that they can learn how far they got. A
push of one that is forgotten is refused as stale all the same."""


class Era(NamedTuple):
    """The mode under which a member pushed, or ended."""

    mode: Mode
    mode_clock: int

    def streams(self, member: Member, sequence: int) -> bool:
        """Whether a push is applied by itself and not as part of a clock.

        Up to its base a member has what it pushed before the mode changed from one
        without clocks; after the clock at which a mode without clocks began, too.
        """
        if sequence <= member.base_sequence:
            return True
        if self.mode.rules.is_clocked:
            return False
        return member.clock_of(sequence) > self.mode_clock


@dataclass(slots=True)
class MemberOnShard:
    """One start of one worker.

    When a record closes it, its window stays, so that it can learn how far it got; all
    else is dropped at once.

    Attributes:
        window: Its pushes.
        departure: How it ended, if it has.
        era: The mode under which it ended.
        differing: Workers from whose hyperparameters its own differ, and that is said.
        redeclared: Workers from whose declaration its own differs, and that is said.
        heard_ms: When it was last heard.
        idle_sequence: The push for which it said that it has no data, else 0.
        staged: The clock of which it has heard that all is there.
        ready: Its push of which it says that every shard holds all, and the place of
            that among those of all workers.
        ready_ms: When it has said so.
        last_ms: Since when it pushes what is its last for now, None once that counts.
        saved_since_ms: Where the time begins that clocks may wait for such a push: as
            long as from here to `last_ms`.
        committed_sequence: Its push that is committed, in SSP and ASP.
        numbered: Clocks under which `staged` was sent for its pushes.
        newest: By optimizer, the trailer of its newest push in SSP and ASP.
        seen_update: Update of the shard that its values have, in SSP and ASP.
        gradients: Its gradients that did not count as they were sent.
        first_update: The same of the first of the values that are under way to it.
    """

    window: PushWindow
    departure: Departure | None = None
    era: Era | None = None
    differing: set[WorkerKey] = field(default_factory=set)
    redeclared: set[WorkerKey] = field(default_factory=set)
    heard_ms: int | None = None
    idle_sequence: int = 0
    staged: ClockChoice | None = None
    ready: tuple[int, int] = (0, 0)
    ready_ms: int = 0
    last_ms: int | None = None
    saved_since_ms: int = -LAST_PUSH_WAIT_MS
    committed_sequence: int = 0
    numbered: dict[int, int] = field(default_factory=dict)
    newest: dict[str, Trailer] = field(default_factory=dict)
    seen_update: int = 0
    first_update: int | None = None
    gradients: GradientCounts = NO_COUNTS

    def note_push(self, sequence: int, now_ms: int) -> None:
        """The worker pushes: it has data, unless that is an older push sent again."""
        self.heard_ms = now_ms
        if sequence >= self.idle_sequence:
            self.idle_sequence = 0

    def begin_last(self, now_ms: int) -> None:
        """It pushes, and has no data for another push."""
        if self.last_ms is None:
            earliest_ms = now_ms - LAST_PUSH_WAIT_MS
            self.saved_since_ms = max(self.saved_since_ms, earliest_ms)
            self.last_ms = now_ms

    @property
    def last_until_ms(self) -> int | None:
        """Until when clocks wait for its last push; None where they do not."""
        if self.last_ms is None:
            return None
        return self.last_ms + (self.last_ms - self.saved_since_ms)

    def end_last(self, now_ms: int) -> None:
        """That has counted, or it has data again."""
        if self.last_ms is not None and self.last_until_ms is not None:
            waited_ms = min(now_ms, self.last_until_ms) - self.last_ms
            self.saved_since_ms += 2 * waited_ms  # spent, and nothing saved meanwhile
            self.last_ms = None

    def step_ms(self, now_ms: int) -> int:
        """Time in its step: since the worker was heard, or its push was done."""
        return NOT_KNOWN if self.heard_ms is None else now_ms - self.heard_ms


class MembersOnShard:
    """The workers that a shard knows: members, and those that have ended lately."""

    def __init__(self) -> None:
        self._all: dict[WorkerKey, MemberOnShard] = {}
        self._lost_ms: Mapping[WorkerKey, int] = {}
        self._lost_at_ms: int | None = None

    def of(self, worker: WorkerKey) -> MemberOnShard:
        """What is kept for a worker, made when it is new."""
        known = self._all.get(worker)
        if known is None:
            known = self._all[worker] = MemberOnShard(PushWindow(worker))
        return known

    def window_of(self, worker: WorkerKey) -> PushWindow:
        """Pushes of a worker, without making anything."""
        known = self._all.get(worker)
        return PushWindow(worker) if known is None else known.window

    def entry_of(self, push: PushId) -> PushEntry | None:
        """A push, if anything of it is here."""
        return self.window_of(push.worker).entries.get(push.sequence)

    def departure_of(self, worker: WorkerKey) -> Departure | None:
        """How a worker ended, if it has."""
        known = self._all.get(worker)
        return None if known is None else known.departure

    def era_of(self, worker: WorkerKey) -> Era | None:
        """The mode under which a worker ended, if it has."""
        known = self._all.get(worker)
        return None if known is None else known.era

    def __iter__(self) -> Iterator[MemberOnShard]:
        """All of them."""
        return iter(self._all.values())

    # Ends

    def close(self, departure: Departure, era: Era) -> None:
        """A record closes a start of a worker; of its first such record the era counts.

        A worker that has ended for longest comes first.
        """
        worker = departure.member.worker
        known = self.of(worker)
        if known.departure is None:
            del self._all[worker]
        self._all[worker] = MemberOnShard(
            known.window,
            departure=departure,
            era=known.era or era,
            differing=known.differing,
            redeclared=known.redeclared,
        )

    def forget_departed(self, unfinished: set[WorkerKey]) -> None:
        """Drops the oldest of those that have ended, when there are too many.

        Not sooner: whoever comes back asks how far it got, be it that others had its id
        in between.

        Args:
            unfinished: Workers that have ended and of whose pushes some may still be
                asked for.
        """
        departed = [worker for worker, m in self._all.items() if m.departure]
        too_many = max(0, len(departed) - DEPARTED_COUNT_MAX)
        for position, worker in enumerate(departed):
            if worker in unfinished:
                continue
            if position < too_many:
                del self._all[worker]
            else:
                self._all[worker].window.shrink()

    # Waiting

    def note_lost(self, lost_ms: Mapping[WorkerKey, int], now_ms: int) -> None:
        """The coordinator has no sign of life of these, and one of all others."""
        self._lost_ms, self._lost_at_ms = dict(lost_ms), now_ms

    def lost_ms(self, worker: WorkerKey, now_ms: int) -> int:
        """Time without a sign of life, 0 while there is one; see `Awaited`."""
        said_ms = self._lost_at_ms
        if said_ms is None or now_ms - said_ms > WAITING_INTERVAL_MS:
            return NOT_KNOWN
        lost_ms = self._lost_ms.get(worker, 0)
        return lost_ms + now_ms - said_ms if lost_ms > 0 else lost_ms

    def is_idle(self, push: PushId) -> bool:
        """Whether its worker said that it has no data for this push, or one before.

        A clock may have closed without it meanwhile.
        """
        return 0 < self.of(push.worker).idle_sequence <= push.sequence
