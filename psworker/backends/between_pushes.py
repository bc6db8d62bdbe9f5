"""What a worker that takes local steps asks of what trains it, between two pushes."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from pswire.leased_data import DataRange
from psworker.data.pending import PendingData
from psworker.member.session import Session
from psworker.steps.stepper import Stepper
from psworker.transport.values import DrawnData

if TYPE_CHECKING:
    from pswire.membership import Record


class BetweenPushes(Protocol):
    """A worker from one push to the next. In the script's thread."""

    @property
    def rejoin_count(self) -> int:
        """How often the worker was evicted and has joined again."""
        ...

    def place_at(self, clock: int) -> tuple[int, int]:
        """The worker's place among those that take part in a clock, and their number.

        By rank, from 0 without a gap.
        """
        ...

    @property
    def may_miss(self) -> bool:
        """Whether a clock may close without this worker, so that its push is missed."""
        ...

    def refuse_out(self) -> None:
        """Checks that the worker is in the job, as far as it knows.

        Raises:
            ClosedError: The connection is closed, or this is a forked child.
        """
        ...

    def arrive(self) -> bool:
        """The script takes its first step since it has joined.

        Ends what is pushed for it until then, and pulls the newest values.

        Returns:
            Whether there may be newer ones.

        Raises:
            StepTimeoutError: A clock that is open is not complete in time.
        """
        ...

    def pull(self) -> None:
        """Pulls the newest values.

        Raises:
            StepTimeoutError: They did not come in time.
        """
        ...

    def keep_script_state(self) -> None:
        """A push begins beside the script, whose registered state goes with it."""
        ...

    def is_void(self, optimizer: str) -> bool:
        """Whether a step would be of data that is not this worker's any more."""
        ...

    def take_drawn(self, optimizer: str) -> DrawnData:
        """The data behind a step that an optimizer has just taken."""
        ...

    def drop(self, ranges: Iterable[DataRange]) -> None:
        """What was trained on this data is not pushed any more."""
        ...

    def note_wait(self, clock: int, wait_s: float) -> None:
        """A local step has waited for the push of a clock."""
        ...

    def note_round(self, step_count: int, clock: int) -> None:
        """Rounds have so many local steps from a clock on."""
        ...


class JobBetweenPushes:
    """That of a worker of a job."""

    def __init__(
        self, stepper: Stepper, session: Session, pending: PendingData
    ) -> None:
        self._stepper = stepper
        self._session = session
        self._pending = pending
        self._placed_for: tuple[Record | None, int] = (None, 0)
        self._place = (0, 1)

    @property
    def rejoin_count(self) -> int:
        """How often the worker was evicted and has joined again."""
        return self._stepper.rejoin_count

    def place_at(self, clock: int) -> tuple[int, int]:
        """By the newest record."""
        record = self._session.membership.record
        if (record, clock) != self._placed_for:
            rank = self._stepper.member.rank
            ranks = record.ranks_at(clock) if record else ()
            place = sum(each < rank for each in ranks)
            self._placed_for, self._place = (record, clock), (place, max(1, len(ranks)))
        return self._place

    @property
    def may_miss(self) -> bool:
        """Whether the clocks of the newest record close without who is late."""
        record, settings = self._session.membership.record, self._session.settings
        rules = record.mode.rules if record else settings.mode.rules
        return rules.has_quorum or (
            rules.is_clocked and settings.backup_worker_count > 0
        )

    def refuse_out(self) -> None:
        """Checks that the connection is open, and of this process."""
        self._stepper.refuse_closed()

    def arrive(self) -> bool:
        """Has the script set back if the job has returned to a checkpoint, first."""
        self._session.rewinds.end()
        has_moved = self._stepper.catch_up()
        record = self._session.membership.record
        if record is None or record.mode.rules.is_clocked:
            return has_moved
        self._stepper.pull()  # no clock has told it of what others pushed
        return True

    def pull(self) -> None:
        """Pulls the newest values."""
        self._stepper.pull()

    def keep_script_state(self) -> None:
        """Copies it, as of the next push."""
        self._stepper.keep_script_state()

    def is_void(self, optimizer: str) -> bool:
        """By its batch, or because the job has returned since it was drawn."""
        return self._pending.is_of_lost or self._stepper.is_void(optimizer)

    def take_drawn(self, optimizer: str) -> DrawnData:
        """That of a step which changed nothing is dropped, as far as it is its own."""
        drawn = self._pending.take(optimizer)
        if drawn.is_of_lost:
            self.drop(drawn.ranges)
        return drawn

    def drop(self, ranges: Iterable[DataRange]) -> None:
        """It counts as dropped in the report of the epoch."""
        self._pending.unreported.note(ranges, is_dropped=True)

    def note_wait(self, clock: int, wait_s: float) -> None:
        """Writes it into the worker's history."""
        self._session.note_wait(clock, wait_s)

    def note_round(self, step_count: int, clock: int) -> None:
        """Records it in the worker's history."""
        self._session.note_round(step_count, clock)
