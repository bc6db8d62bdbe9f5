"""Fences of a job: numbered, one at a time."""

from psserver.coordinator.core.fence import ActiveFence, MembershipChange, ModeTarget
from pswire.membership import FenceKind, WorkerKey

NUMBERS_PER_START = 1_000_000_000
"""Fences and snapshots that one start of the coordinator may number.

A cut writes no record, so a new process can't know the last number its predecessor
used, and a number must never come twice: shards ignore a fence that is not newer, and
an image that kept its name would be mixed with another.
"""


class FenceSeries:
    """The fence that is open, and the numbers of all others.

    Args:
        start_count: Starts of the coordinator before this one.

    Attributes:
        open: The fence that is open.
        closed_number: Newest fence that is over.
    """

    def __init__(self, start_count: int) -> None:
        self.open: ActiveFence | None = None
        self.closed_number = start_count * NUMBERS_PER_START
        self._next_number = self.closed_number + 1

    def begin(
        self,
        kind: FenceKind,
        now_ms: int,
        *,
        change: MembershipChange | None = None,
        target: ModeTarget | None = None,
        starters: tuple[WorkerKey, ...] = (),
    ) -> ActiveFence:
        """Opens the next fence; none is open."""
        assert self.open is None
        self.open = ActiveFence(
            number=self._next_number,
            kind=kind,
            opened_ms=now_ms,
            change=change or MembershipChange(),
            target=target,
            seeder=starters[0] if starters else None,
            starters=starters,
        )
        self._next_number += 1
        return self.open

    def end(self) -> ActiveFence:
        """The open fence is over."""
        ended = self.open
        assert ended is not None
        self.open = None
        self.closed_number = ended.number
        return ended
